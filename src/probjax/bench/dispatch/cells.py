"""The cells of the suite `dispatch`."""

from dataclasses import dataclass
from typing import Any

from probjax.bench.attention.cells import AttentionCell

MODES = ("fwd", "fwd_bwd")
CELL_COLUMNS = ("suite", "dtype", "head_dim", "seq", "causal", "mode", "batch", "heads", "precision")


@dataclass(frozen=True)
class DispatchCell:
    """One call of self-attention.

    Attributes:
      dtype: of all arrays.
      head_dim: size of a head.
      seq: tokens of a sequence.
      causal: whether a query sees no later key.
      mode: ``fwd`` for the output, ``fwd_bwd`` for the output and all gradients for a given cotangent.
      batch: number of sequences.
      heads: number of heads.
      precision: of the matrix products, ``default`` or ``highest``.
    """

    dtype: str
    head_dim: int
    seq: int
    causal: bool
    mode: str
    batch: int
    heads: int
    precision: str = "default"

    @property
    def attention(self) -> AttentionCell:
        """The same call as a cell of the suite `attention`."""
        return AttentionCell(
            mode="fwd" if self.mode == "fwd" else "fwdbwd",
            variant="causal" if self.causal else "plain",
            dtype=self.dtype,
            batch=self.batch,
            seq=self.seq,
            heads=self.heads,
            head_dim=self.head_dim,
            precision=self.precision,
        )

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        causal = "causal" if self.causal else "plain"
        return f"{causal} {self.mode} {self.dtype} S {self.seq} D {self.head_dim}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        return (self.mode, self.dtype)

    @property
    def work(self) -> float:
        """Arithmetic operations of one call without a mask."""
        return self.attention.work

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        return {"suite": "dispatch", **{name: getattr(self, name) for name in CELL_COLUMNS[1:]}}
