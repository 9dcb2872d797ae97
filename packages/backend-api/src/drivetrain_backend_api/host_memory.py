"""How much memory this host has left: for all processes, and for those of one node that mean to take some together.

Never imports torch; the group that ranks agree over is the caller's.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """What one rank is about to take.

    Attributes:
        host: name of the machine, or of the container, with what tells it from others of that name.
        needed: bytes.
        free: bytes that are left there, None where the system does not say.
    """

    host: tuple[str, str]
    needed: int
    free: int | None

    @classmethod
    def of_this_process(cls, needed: int) -> "HostNeed":
        """Look at the machine."""
        boot = _text(Path("/proc/sys/kernel/random/boot_id")).strip()
        return cls(host=(socket.gethostname(), boot), needed=needed, free=available_memory())


def need_findings(needs: Sequence[HostNeed]) -> list[str]:
    """Say which hosts do not have what all of their ranks need together, in bytes."""
    findings = []
    for host in dict.fromkeys(one.host for one in needs):
        ranks = [one for one in needs if one.host == host]
        needed = sum(one.needed for one in ranks)
        free = min((one.free for one in ranks if one.free is not None), default=needed)
        if needed > free:
            who = f"the {len(ranks)} ranks on host {host[0]} need" if len(ranks) > 1 else f"a rank on {host[0]} needs"
            findings.append(f"{who} {needed} bytes of memory and {free} are free")
    return findings


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that new processes can have here: what is free, swap included, within every control group.

    Args:
        root: of the file system in which /proc and /sys/fs/cgroup are.

    Returns: None where the system does not say.
    """
    found = [one for one in (_free_memory(root), *_within_groups(root)) if one is not None]
    return min(found, default=None)


def _free_memory(root: Path) -> int | None:
    table = _numbers(root / "proc/meminfo")
    if "MemAvailable:" in table:
        return 1024 * (table["MemAvailable:"] + table.get("SwapFree:", 0))
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not a name there
        return None


def _within_groups(root: Path) -> Iterator[int | None]:
    """Yield what each control group of this process leaves: version 2, and the memory controller of version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, limit, usage, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if base not in (folder, *folder.parents):
                break
            yield _left(folder / limit, folder / usage, _numbers(folder / "memory.stat"), prefix)


def _left(limit: Path, usage: Path, stat: dict[str, int], prefix: str) -> int | None:
    allowed, used = _text(limit).strip(), _text(usage).strip()
    if not (allowed.isdecimal() and used.isdecimal()):  # "max", or no such group here
        return None
    reclaimable = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return max(0, int(allowed) - max(0, int(used) - reclaimable))


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name, a number and perhaps a unit."""
    words = [line.split() for line in _text(path).splitlines()]
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
