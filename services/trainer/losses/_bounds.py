"""The range that losses clip a ratio to, said in either of two ways."""

from __future__ import annotations

from pydantic import Field, model_validator

from paceline.config import StrictModel


class RatioBounds(StrictModel):
    """[1 - clip_low, 1 + clip_high], where ratio_low and ratio_high, which are absolute, replace an end."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: float = Field(default=0.2, gt=0)
    ratio_low: float | None = Field(default=None, ge=0)
    """Smallest ratio itself, in place of 1 - clip_low (Tinker's clip_low_threshold)."""
    ratio_high: float | None = Field(default=None, gt=0)
    """Largest ratio itself, in place of 1 + clip_high (Tinker's clip_high_threshold)."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio."""
        low = 1 - self.clip_low if self.ratio_low is None else self.ratio_low
        return low, 1 + self.clip_high if self.ratio_high is None else self.ratio_high

    @model_validator(mode="after")
    def _ordered(self) -> RatioBounds:
        low, high = self.bounds
        if low > high:
            raise ValueError(f"the smallest ratio {low} is above the largest, {high}")
        return self
