"""The prefix index: a chain of digests, one per full block, verified at every lookup.

A node represents "these tokens after that prefix", independent of the blocks that hold its keys at the moment. It
refers to its parent by identity and to its tokens by value, so a walk from the root that finds node after node has
compared the whole prefix: digests that collide cost a hit, never a wrong block. Nodes outlive their blocks while a
longer prefix or a running sequence depends on them, so a sliding-window group that lost its early blocks still matches.

The index also counts, by digest, the registered sequences that will read a prefix. These counts only affect the
eviction order, so digests that collide cost nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from engine.plan import NO_BLOCK

Digest = Callable[[bytes, bytes], bytes]
"""(digest of the parent, token bytes of the block) -> digest of the block's prefix."""


def chain_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """16 bytes of BLAKE2b over the parent's digest and the block's int32 token ids."""
    return blake2b(parent + token_bytes, digest_size=16).digest()


class HashChain:
    """The digests of one sequence's full blocks, computed at most once each.

    Attributes:
        root_key: start of the chain (salt, adapter, and the prompt's length where keys depend on it).
    """

    __slots__ = ("_digest", "_digests", "root_key")

    def __init__(self, salt: bytes, prompt_length: int | None, digest: Digest, adapter: bytes = b"") -> None:
        """`adapter`: 16 bytes that identify the adapter that its keys depend on, or none."""
        self.root_key = (b"%d/%b" if adapter else b"%d:%b") % (prompt_length or 0, adapter) + salt
        self._digest = digest
        self._digests = [digest(b"", self.root_key)]

    @classmethod
    def of_prompt(
        cls, salt: bytes, num_tokens: int, rope_original_max: int | None, digest: Digest, adapter: bytes = b""
    ) -> HashChain:
        """Make the chain of a prompt of `num_tokens`. Beyond `rope_original_max` tokens all its keys depend on its
        length (`ModelSpec.rope_original_max`; None: none do)."""
        depends = rope_original_max is not None and num_tokens > rope_original_max
        return cls(salt, num_tokens if depends else None, digest, adapter)

    @property
    def root_digest(self) -> bytes:
        return self._digests[0]

    def of_block(self, block: int, token_bytes: bytes) -> bytes:
        """Return the digest of block index `block`, whose predecessors were requested before."""
        digests = self._digests
        if block + 1 == len(digests):
            digests.append(self._digest(digests[block], token_bytes))
        return digests[block + 1]

    def known(self, block: int) -> bytes | None:
        """Return the digest of block index `block`, if it was requested before."""
        return self._digests[block + 1] if block + 1 < len(self._digests) else None

    def fork(self, num_blocks: int) -> HashChain:
        """Return a copy with the first `num_blocks` digests (as far as this chain has them)."""
        twin = HashChain.__new__(HashChain)
        twin.root_key = self.root_key
        twin._digest = self._digest
        twin._digests = self._digests[: num_blocks + 1]
        return twin


class PrefixNode:
    """The tokens of one full block after a given prefix.

    Attributes:
        parent: the prefix before it; None for a root.
        blocks: per cache group the block that holds its keys, or `NO_BLOCK`.
        refs: children + published blocks + running sequences whose chain ends here.
        on_disk: groups whose block was loaded from the second tier on disk, or is to be stored there
            (`engine.cache.tiering`).
    """

    __slots__ = ("blocks", "digest", "on_disk", "parent", "refs", "token_bytes")

    def __init__(self, parent: PrefixNode | None, digest: bytes, token_bytes: bytes, num_groups: int) -> None:
        self.parent = parent
        self.digest = digest
        self.token_bytes = token_bytes
        self.blocks = [NO_BLOCK] * num_groups
        self.refs = 0
        self.on_disk: frozenset[int] = frozenset()


class PrefixIndex:
    """Finds the node of a prefix; removes it when nothing refers to it any more."""

    __slots__ = ("_nodes", "_num_groups", "_readers", "digest")

    def __init__(self, num_groups: int, digest: Digest = chain_digest) -> None:
        self.digest = digest
        self._num_groups = num_groups
        self._nodes: dict[bytes, PrefixNode] = {}
        self._readers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, parent: PrefixNode | None, digest: bytes, token_bytes: bytes) -> PrefixNode | None:
        """Return the node of exactly these tokens after exactly this parent, or None."""
        node = self._nodes.get(digest)
        if node is None or node.parent is not parent or node.token_bytes != token_bytes:
            return None
        return node

    def extend(self, parent: PrefixNode | None, digest: bytes, token_bytes: bytes) -> PrefixNode | None:
        """Find or create the node; None when another prefix has the digest. The caller must `hold` the node."""
        node = self._nodes.get(digest)
        if node is None:
            node = self._nodes[digest] = PrefixNode(parent, digest, token_bytes, self._num_groups)
            if parent is not None:
                parent.refs += 1
            return node
        if node.parent is not parent or node.token_bytes != token_bytes:
            return None
        return node

    def hold(self, node: PrefixNode) -> None:
        """Add a reference to the node."""
        node.refs += 1

    def drop(self, node: PrefixNode) -> None:
        """Release one `hold`; with the last one the node, and ancestors that only it referred to, are removed."""
        current: PrefixNode | None = node
        while current is not None:
            current.refs -= 1
            if current.refs:
                return
            del self._nodes[current.digest]
            current = current.parent

    def is_awaited(self, node: PrefixNode) -> bool:
        """Whether sequences are registered that will read this prefix."""
        return node.digest in self._readers

    def num_readers(self, digest: bytes | None) -> int:
        """Return how many registered sequences will read the prefix; one more if earlier ones computed it."""
        return 0 if digest is None else self._readers.get(digest, 0) + (digest in self._nodes)

    def expect(self, digest: bytes) -> PrefixNode | None:
        """Register a sequence that will read the prefix; returns its node, if any, when the sequence is the first."""
        readers = self._readers.get(digest, 0)
        self._readers[digest] = readers + 1
        return None if readers else self._nodes.get(digest)

    def dismiss(self, digest: bytes) -> PrefixNode | None:
        """Unregister one `expect`; returns the prefix's node, if any, when no registered reader is left."""
        readers = self._readers[digest] - 1
        if readers:
            self._readers[digest] = readers
            return None
        del self._readers[digest]
        return self._nodes.get(digest)

    def check(self, holders: dict[int, int]) -> None:
        """Compare every node's references with `holders` (id(node) -> blocks and sequences) plus its children."""
        children: dict[int, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        for node in self._nodes.values():
            due = children.get(id(node), 0) + holders.get(id(node), 0)
            if node.refs != due:
                raise AssertionError(
                    f"prefix node {node.digest.hex()}: refs {node.refs} != "
                    f"{children.get(id(node), 0)} children + {holders.get(id(node), 0)} holders"
                )
