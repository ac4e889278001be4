"""A rank's shard of an adapter: these rows of B where a module's rows are sharded, these columns of A where its columns
are. The sum over the ranks that completes a row-parallel product completes the adapter's, too: B (A x) is a sum over
the columns of A.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.adapters.adapter import Adapter
from engine.adapters.linear import TorchAdapter
from engine.adapters.targets import find_targets
from engine.errors import UnsupportedModel
from engine.parallel.sharding import Share


@dataclass(frozen=True, slots=True)
class SharedAdapter:
    """An adapter as the leader's places take it.

    Attributes:
        adapter: that the other ranks open from its folder.  own: the leader's shard.
    """

    adapter: Adapter
    own: TorchAdapter

    @property
    def nbytes(self) -> int:
        """Of the leader's shard; the other ranks read theirs when it is put in a place."""
        return self.own.nbytes


def shard_adapter(adapter: Adapter, share: Share) -> Adapter:
    """Return the rank's shard of an adapter of the whole model.

    Raises:
        UnsupportedModel: it changes a module that the ranks share in pieces that do not lie next to each other.
    """
    local = find_targets(share.local)
    names = {target: name for name, target in reversed([*find_targets(share.spec).items()])}
    found = {}
    for at, parts in adapter.parts.items():
        sharded = []
        for part in parts:
            name = names[part.target]
            cut = share.cut(f"model.{name}.weight")
            target = local.get(name)
            axis = None if cut is None else cut.axis
            a = slice(cut.first, cut.end) if cut is not None and axis == 1 else slice(0, part.target.columns)
            b = slice(cut.first, cut.end) if cut is not None and axis == 0 else slice(0, part.target.rows)
            if target is None or (target.rows, target.columns) != (b.stop - b.start, a.stop - a.start):
                raise UnsupportedModel(
                    f"{adapter.name} changes {name}, which several devices can't share with an adapter; leave "
                    "--tensor-parallel out"
                )
            sharded.append(part._replace(target=target, a_columns=a, b_rows=b))
        found[at] = tuple(sharded)
    return replace(adapter, parts=found, decoder=share.local)
