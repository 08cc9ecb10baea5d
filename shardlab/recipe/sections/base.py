"""What all sections of a recipe share: values are strict, and nothing changes after validation."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

Names = Annotated[tuple[str, ...], Strict(False)]  # a YAML list; a tuple here, so that it is frozen too
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Unknown keys, numeric strings and non-finite numbers are refused, and nothing changes after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
