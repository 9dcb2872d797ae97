"""Process groups that can be destroyed and rebuilt, all of a process at once, under the handles it already holds.

A training process keeps group objects everywhere: in globals, modules, buffers and autograd contexts. So each group is
handed out as a handle, a `ProcessGroup` that passes every call to an inner group, and only the inner group is replaced.
torch.distributed knows the handle and never the inner group, so that its own functions need no patch. All patches of
torch.distributed are here. Knows no backend.
"""

import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from drivetrain_backend_api.errors import DrivetrainError, IllegalStateError, in_one_line

_KEYS = "rebuildable_groups"
_FAREWELL = datetime.timedelta(seconds=5)  # how long the host of the store waits for the others to leave
_PER_GROUP = ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag", "pg_group_ranks", "pg_flight_recorder_hooks")
# What c10d raises from C++; all of its own errors derive from RuntimeError.
_C10D_ERRORS = (RuntimeError, ValueError)


class GroupHandle(dist.ProcessGroup):
    """A process group that stands for another one, which can be taken away and replaced.

    Rank, size, name and description answer while it is asleep too; anything else is then an `IllegalStateError`.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner: dist.ProcessGroup | None = inner
        self._facts = {"group_name": inner.group_name, "group_desc": inner.group_desc}
        self._rank_and_size = (inner.rank(), inner.size())

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank_and_size[0]

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self._rank_and_size[1]

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a split cannot be replayed.

        Raises:
            IllegalStateError: always.
        """
        raise IllegalStateError("split_group() makes a group that cannot be rebuilt; make it with new_group(ranks)")

    merge_remote_group = split_group

    def __getattr__(self, name: str) -> Any:
        """Pass on what `ProcessGroup` itself does not define."""
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(_awake(self, name), name)


def _awake(handle: GroupHandle, name: str) -> dist.ProcessGroup:
    inner = handle.__dict__["_inner"]
    if inner is None:
        facts = handle.__dict__["_facts"]
        raise IllegalStateError(
            f"{name} is illegal on process group {facts['group_name']!r} ({facts['group_desc']}) while it is asleep: "
            "call rebuild() first"
        )
    return inner  # type: ignore[no-any-return]


def _passed_on(name: str) -> Callable[..., Any]:
    def method(handle: GroupHandle, *args: Any, **kwargs: Any) -> Any:
        return getattr(_awake(handle, name), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _property_passed_on(name: str) -> property:
    def read(handle: GroupHandle) -> Any:
        if handle.__dict__["_inner"] is None and name in handle.__dict__["_facts"]:
            return handle.__dict__["_facts"][name]
        return getattr(_awake(handle, name), name)

    def write(handle: GroupHandle, value: Any) -> None:
        setattr(_awake(handle, name), name, value)

    return property(read, write)


# Read off the class, since torch versions add methods; as methods of the subclass C++ finds them too.
for _name, _member in vars(dist.ProcessGroup).items():
    if _name.startswith(("__", "_pybind11")) or _name in vars(GroupHandle):
        continue
    if isinstance(_member, property):
        setattr(GroupHandle, _name, _property_passed_on(_name))
    elif callable(_member) and not isinstance(_member, (type, staticmethod)):
        setattr(GroupHandle, _name, _passed_on(_name))


@dataclass(kw_only=True)
class _Creation:
    """One collective call that made a group, to be replayed.

    Attributes:
        handle: what it gave; None where this rank is no member.
        ended: the group was destroyed alone, by its user.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    handle: GroupHandle | None = None
    ended: bool = False


class _State(Enum):
    NEW = "not initialised"
    AWAKE = "awake"
    ASLEEP = "asleep"
    BROKEN = "broken by an earlier error"
    CLOSED = "closed"


_installed: "RebuildableGroups | None" = None


@dataclass(kw_only=True)
class _Originals:
    new_process_group_helper: Callable[..., Any] = field(default_factory=lambda: c10d._new_process_group_helper)
    new_group_with_tag: Callable[..., Any] = field(default_factory=lambda: c10d._new_group_with_tag)
    batch_isend_irecv: Callable[..., Any] = field(default_factory=lambda: c10d.batch_isend_irecv)


class RebuildableGroups:
    """Makes every group of this process, WORLD included, one that can be destroyed and rebuilt.

        with RebuildableGroups() as groups:
            groups.init("nccl", rank=rank, world_size=world_size, timeout=timeout)
            ...                 # new_group() in any spelling, collectives
            groups.destroy()    # all communicators are gone; a gloo WORLD stands in
            groups.rebuild()    # the same handles work again

    `init`, `destroy`, `rebuild` and `close` are collective. A group's options that were changed after its creation
    (`set_timeout`, hooks) are those of its creation again after `rebuild`.
    """

    def __init__(self) -> None:
        self._originals: _Originals | None = None
        self._state = _State.NEW
        self._world: _Creation | None = None
        self._creations: list[_Creation] = []
        self._replaying: _Creation | None = None  # the creation that is under way
        self._generation = 0
        self._barriers = 0

    @property
    def handles(self) -> tuple[dist.ProcessGroup, ...]:
        """All handles that can be used after `rebuild`: WORLD first, then in order of creation."""
        made = [one for one in (self._world, *self._creations) if one is not None]
        return tuple(one.handle for one in made if one.handle is not None and not one.ended)

    # -- patches ------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Patch torch.distributed; before any group exists. A second call does nothing.

        Raises:
            IllegalStateError: groups exist already, or another instance is installed.
        """
        global _installed
        if _installed is self:
            return
        if _installed is not None:
            raise IllegalStateError("another RebuildableGroups is installed in this process; close() it first")
        if self._state is not _State.NEW:
            raise IllegalStateError(f"install() is illegal while the groups are {self._state.value}; make a new one")
        if dist.is_initialized():
            raise IllegalStateError("install() needs a process without process groups; destroy them first")
        self._originals = _Originals()
        c10d._new_process_group_helper = self._helper_patch(self._originals.new_process_group_helper)
        c10d._new_group_with_tag = self._new_group_patch(self._originals.new_group_with_tag)
        c10d.batch_isend_irecv = dist.batch_isend_irecv = _batch_patch(self._originals.batch_isend_irecv)
        _installed = self

    def uninstall(self) -> None:
        """Undo the patches. Handles go on working; new groups are torch's own."""
        global _installed
        if self._originals is None:
            return
        c10d._new_process_group_helper = self._originals.new_process_group_helper
        c10d._new_group_with_tag = self._originals.new_group_with_tag
        c10d.batch_isend_irecv = dist.batch_isend_irecv = self._originals.batch_isend_irecv
        self._originals = None
        _installed = None

    def _helper_patch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Every group of torch.distributed comes from here; one that is recorded leaves as a handle."""

        @functools.wraps(original)
        def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            creation = self._replaying
            made, store = original(*args, **kwargs)
            # A tag may find an earlier group: a handle already.
            if creation is None or not isinstance(made, dist.ProcessGroup) or creation.ended:
                return made, store
            if isinstance(made, GroupHandle):
                creation.handle = made
                return made, store
            if creation.handle is None:
                creation.handle = GroupHandle(made)
            else:
                creation.handle._inner = made
            _put_in_place_of(made, creation.handle)
            return creation.handle, store

        return new_process_group_helper

    def _new_group_patch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Every spelling of new_group calls this one."""

        @functools.wraps(original)
        def new_group_with_tag(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._state is not _State.AWAKE:
                raise IllegalStateError(
                    f"new_group() is illegal while the process groups are {self._state.value}: make groups between "
                    "init() and destroy(), or after rebuild()"
                )
            ranks = None if ranks is None else list(ranks)  # the caller may change its list
            creation = _Creation(args=(ranks, *args), kwargs=kwargs)
            made = self._make(creation, original)
            self._creations.append(creation)
            return made

        return new_group_with_tag

    def _make(self, creation: _Creation, how: Callable[..., Any]) -> Any:
        self._replaying = creation
        try:
            return how(*creation.args, **creation.kwargs)
        finally:
            self._replaying = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def init(
        self,
        backend: str,
        *,
        rank: int,
        world_size: int,
        timeout: datetime.timedelta,
        store: Store | None = None,
    ) -> None:
        """Make WORLD.

        One store serves every later rebuild, each under a prefix of its own, so that no port is ever asked for again.

        Args:
            backend: as for `init_process_group`.
            timeout: of WORLD's collectives, and how long `destroy` and `rebuild` wait for the other ranks.
            store: where the ranks meet; None: the TCP store at MASTER_ADDR:MASTER_PORT, which rank 0 serves.

        Raises:
            DrivetrainError: the ranks did not meet within `timeout`.
        """
        if _installed is not self:
            raise IllegalStateError("init() needs install() first")
        self._require(_State.NEW, "init")
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._world = _Creation(args=(backend,), kwargs={})
        self._hosts_store = store is None and rank == 0
        self._excepthook = sys.excepthook
        try:
            if store is None:
                store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
                store.set_timeout(timeout)
            self._store = store
            self._make_world()
        except _C10D_ERRORS as error:
            self._state = _State.BROKEN
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise DrivetrainError(
                f"rank {rank} of {world_size} could not meet the others at {where} (MASTER_ADDR:MASTER_PORT) within "
                f"{timeout}: {in_one_line(error)}"
            ) from error
        self._torch_excepthook = sys.excepthook
        self._state = _State.AWAKE

    def destroy(self, timeout: datetime.timedelta | None = None) -> None:
        """Destroy all groups once every rank is here; a gloo WORLD, for small facts only, stands in.

        `group=None` and `dist.get_rank()` mean that WORLD while the groups are asleep.

        Args:
            timeout: how long to wait for the other ranks; None: as given to `init`.

        Raises:
            DrivetrainError: a rank did not come, on all ranks; the groups are as they were, and may be destroyed again.
        """
        self._require(_State.AWAKE, "destroy")
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self._barrier("destroy", timeout)
        with self._breaks("destroy"):
            asleep = self._tear_down()
            self._next_generation()
            with _same_excepthook():
                self._join("gloo")
            for handle, (ranks, backend) in asleep.items():  # who is where can still be asked
                c10d._world.pg_group_ranks[handle], c10d._world.pg_map[handle] = ranks, backend
            self._state = _State.ASLEEP
            # a rank that went on and ended would break the others' way into that WORLD
            self._barrier("finish destroying", timeout)

    def rebuild(self, timeout: datetime.timedelta | None = None) -> None:
        """Make all groups again, in the order and with the arguments of their creation, under the same handles.

        Args:
            timeout: how long to wait for the other ranks, before and after; None: as given to `init`. Making each group
                has the timeout of that group.

        Raises:
            DrivetrainError: a rank did not come, on all ranks; where that was before anything was made, `rebuild` may
                be called again.
        """
        self._require(_State.ASLEEP, "rebuild")
        self._barrier("rebuild", timeout)
        with self._breaks("rebuild"):
            assert self._originals is not None
            dist.destroy_process_group()
            before = self._generation
            self._next_generation()
            with _same_excepthook():
                self._make_world()
            for creation in self._creations:
                made = self._make(creation, self._originals.new_group_with_tag)
                if creation.ended and made != dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(made)  # making it is collective, and counts in the names of later ones
            self._state = _State.AWAKE
            self._barrier("finish rebuilding", timeout)
        self._forget(before)

    def close(self) -> None:
        """Destroy all groups for good and undo the patches. Does nothing the second time."""
        if self._state is _State.CLOSED:
            return
        met = self._state in (_State.AWAKE, _State.ASLEEP)
        if self._state is not _State.NEW and dist.is_initialized():
            self._tear_down()
            if sys.excepthook is getattr(self, "_torch_excepthook", None):
                sys.excepthook = self._excepthook
        self.uninstall()
        if met:
            self._leave_store()
            del self._store
        self._creations.clear()
        self._world = None
        self._state = _State.CLOSED

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _require(self, state: _State, call: str) -> None:
        if self._state is not state:
            raise IllegalStateError(
                f"{call}() is illegal while the process groups are {self._state.value}; they must be {state.value}"
            )

    @contextlib.contextmanager
    def _breaks(self, call: str) -> Iterator[None]:
        """Half-made groups are good for nothing: what fails in here ends all use."""
        try:
            yield
        except BaseException as error:
            self._state = _State.BROKEN
            if isinstance(error, _C10D_ERRORS):
                raise DrivetrainError(
                    f"rank {self._rank} of {self._world_size} could not {call} its process groups; end all ranks and "
                    f"start them again: {in_one_line(error)}"
                ) from error
            raise

    def _make_world(self) -> None:
        assert self._world is not None
        self._make(self._world, self._join)

    def _join(self, backend: str) -> None:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"{_KEYS}/{self._generation}", self._store),
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )

    def _tear_down(self) -> dict[GroupHandle, tuple[Any, Any]]:
        """Destroy WORLD as a whole: one sub-group at a time deadlocks ranks whose turns differ.

        Returns:
            The global ranks, and the backend, of each group, as torch keeps them.
        """
        known: dict[GroupHandle, tuple[Any, Any]] = {}
        for creation in (self._world, *self._creations):
            if creation is None or creation.handle is None or creation.ended:
                continue
            inner = creation.handle._inner
            if creation.handle in c10d._world.pg_map:
                known[creation.handle] = (
                    c10d._world.pg_group_ranks[creation.handle],
                    c10d._world.pg_map[creation.handle],
                )
                if inner is not None and inner._has_hooks():
                    inner._wait_for_pending_works()
            elif inner is not None:
                creation.ended = True
        dist.destroy_process_group()
        for creation in (self._world, *self._creations):
            if creation is not None and creation.handle is not None:
                creation.handle._inner = None
        return known

    def _next_generation(self) -> None:
        self._generation += 1

    def _barrier(self, what: str, timeout: datetime.timedelta | None) -> None:
        """Wait on the store, which outlives all groups, until every rank is here; all ranks pass or none does.

        Raises:
            DrivetrainError: with the ranks that did not come; also on a rank that comes when the others have given up.
        """
        timeout = timeout or self._timeout
        self._barriers += 1
        name = f"{_KEYS}/{self._generation}/barrier/{self._barriers}"
        outcome = f"{name}/outcome"
        try:
            self._store.set(f"{name}/{self._rank}", "here")
            if self._store.add(f"{name}/count", 1) == self._world_size:
                self._store.compare_set(outcome, "", "all")
            with contextlib.suppress(*_C10D_ERRORS):  # waited in vain, or the store is gone, as the next line finds
                self._store.wait([outcome], timeout)
            if self._store.compare_set(outcome, "", "given up") == b"all":
                return
            missing = [one for one in range(self._world_size) if not self._store.check([f"{name}/{one}"])]
        except _C10D_ERRORS as error:
            raise DrivetrainError(
                f"rank {self._rank} of {self._world_size} found no store to {what} the process groups by; see the log "
                f"of rank 0, which keeps it: {in_one_line(error)}"
            ) from error
        if not missing:
            raise DrivetrainError(
                f"rank {self._rank} of {self._world_size} came too late to {what} the process groups: "
                "the others gave up"
            )
        raise DrivetrainError(
            f"rank {', '.join(map(str, missing))} of {self._world_size} did not come to {what} the process groups "
            f"within {timeout}; see the log there for what ended or keeps it"
        )

    def _forget(self, before: int) -> None:
        """Delete what the generations up to `before` left in the store, which else grows with every cycle."""
        if self._rank != 0:
            return
        root: Any = self._store
        while isinstance(root, PrefixStore):
            root = root.underlying_store
        if not isinstance(root, TCPStore):
            return
        old = tuple(f"{_KEYS}/{number}/" for number in (before - 1, before))
        for key in root.list_keys():
            if any(one in key for one in old):
                root.delete_key(key)

    def _leave_store(self) -> None:
        """Keep the store up until the other ranks are done with it; the backends' threads complain otherwise."""
        with contextlib.suppress(*_C10D_ERRORS):
            if self._hosts_store:
                others = [f"{_KEYS}/left/{one}" for one in range(1, self._world_size)]
                if others:
                    self._store.wait(others, _FAREWELL)
            else:
                self._store.set(f"{_KEYS}/left/{self._rank}", "left")


def _batch_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send a handle's batch as one; torch up to 2.11 does so for groups of the very class `ProcessGroup` alone.

    One by one, two ranks that both send first wait for each other under NCCL.
    """

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        group = p2p_op_list[0].group if p2p_op_list else None
        group = c10d._get_default_group() if group is None else group
        if not p2p_op_list or not isinstance(group, GroupHandle):
            return original(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        if not getattr(group._get_backend(device), "supports_coalescing", False):
            return original(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for one in p2p_op_list:
                peer = "group_dst" if one.op is dist.isend else "group_src"
                one.op(one.tensor, group=one.group, tag=one.tag, **{peer: one.group_peer})
        return manager.works

    return batch_isend_irecv


def _put_in_place_of(inner: dist.ProcessGroup, handle: GroupHandle) -> None:
    """Let torch.distributed, in Python and C++, know `handle` wherever it knows `inner`."""
    for name in _PER_GROUP:
        entries = getattr(c10d._world, name, {})  # which of them there are differs between torch versions
        if inner in entries:
            entries[handle] = entries.pop(inner)
    for tagged in c10d._world.tags_to_pg.values():
        tagged[:] = [handle if one is inner else one for one in tagged]
    _unregister_process_group(inner.group_name)
    _register_process_group(inner.group_name, handle)


@contextlib.contextmanager
def _same_excepthook() -> Iterator[None]:
    """init_process_group wraps the hook anew each time."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
