"""What a load did, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LoadReport"]


@dataclass
class LoadReport:
    """The outcome of a load on this rank.

    loaded: keys that were filled. missing: wanted but not stored (only with ``strict=False``). unexpected: stored but not wanted. cast:
    key -> (stored dtype, wanted dtype). padded: keys whose padding was filled with zeros. source: key -> ``weight | master | state | key
    | object | param_groups``. kept: hyperparameters that stay as they are because the checkpoint cannot know them (key -> reason).
    unproven: parameters whose optimizer state could not be compared although its writer may have written it wrong (constant values, no
    second copy). skipped: keys left alone because of include/exclude, or unloadable with ``strict=False`` (key -> reason). bytes_read /
    bytes_wanted / ranges: what our reader asked of the store on this rank (0 with a stock reader). bytes_verified / bytes_unverified: the
    wanted bytes of tensors that were, and were not, checked against a digest (``verify`` of the reader says what is checked; stock DCP and
    DeepSpeed checkpoints have no digests).
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    unproven: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_wanted: int = 0
    ranges: int = 0
    bytes_verified: int = 0
    bytes_unverified: int = 0

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} loaded"]
        more = ("missing", "unexpected", "cast", "padded", "kept", "skipped", "unproven")
        parts += [f"{len(v)} {name}" for name in more if (v := getattr(self, name))]
        if self.bytes_wanted:
            parts.append(f"{self.bytes_read} bytes read for {self.bytes_wanted} wanted, {self.bytes_unverified} of them not verified")
        return ", ".join(parts)
