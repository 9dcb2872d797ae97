"""A Ray cluster of several nodes on one machine, for tests of what spans nodes; no part of a run."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ray.cluster_utils import Cluster

from drivetrain_infra.ray_runtime import LOOPBACK, local_environment, owned_temp_dir


@contextlib.contextmanager
def local_cluster(
    run_folder: Path,
    *,
    cpus_per_node: Sequence[int] = (2, 2),
    gpus_per_node: int = 0,
    object_store_bytes: int = 80 * 1024**2,
) -> Iterator[str]:
    """Start the cluster and yield the address to connect to.

    Inside the block, `ray_session(..., address=...)` in this process or a child of it joins the cluster.

    Args:
        run_folder: names the temp dir, as in `ray_session`.
        cpus_per_node: logical CPUs of each node; its length is the number of nodes.
        gpus_per_node: GPUs that each node claims to have, whether or not there are any.
        object_store_bytes: of each node.
    """
    with owned_temp_dir(run_folder) as temp_dir, local_environment(temp_dir):
        (temp_dir / "ray").mkdir()
        cluster = Cluster(shutdown_at_exit=True)
        try:
            for cpus in cpus_per_node:
                cluster.add_node(
                    num_cpus=cpus,
                    num_gpus=gpus_per_node,
                    object_store_memory=object_store_bytes,
                    include_dashboard=False,
                    node_ip_address=LOOPBACK,
                )
            yield str(cluster.address)
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]
