"""An adapter's tensors in this process's memory, read like a file's, with the same checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from asyncengine.errors import AdapterError
from asyncengine.lora.checkpoint.tensor_file import DTYPES, Extent, check_finite, parse_json


class AdapterTensors:
    """Tensors by PEFT's names, as `TensorFile` has them. They stay the caller's."""

    field = "tensors"

    def __init__(self, given: Any) -> None:
        """Raises `AdapterError` for anything but whole float tensors by name."""
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise AdapterError("tensors", "must map PEFT's names to tensors", type(given).__name__)
        self._given: dict[str, torch.Tensor] = dict(given)
        self.tensors: dict[str, Extent] = {}
        dtypes = {dtype: name for name, dtype in DTYPES.items()}
        for name, tensor in self._given.items():
            kind = type(tensor)
            whole = kind in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            if not whole or tensor.is_meta or not tensor.numel():
                raise AdapterError(name[:256], "must be a whole tensor with values", kind.__name__)
            if tensor.dtype not in dtypes:
                raise AdapterError(name[:256], "must be float32, float16 or bfloat16", str(tensor.dtype))
            self.tensors[name] = Extent(dtypes[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the host, contiguous. Raises `AdapterError` for a value that is not finite."""
        tensor = self._given[name].detach().cpu().contiguous()
        check_finite(name, tensor)
        return tensor


def given_config(config: Any) -> dict[str, Any]:
    """An adapter's configuration as its file would have it: a mapping, or PEFT's object with `to_dict`.

    Raises `AdapterError` for what JSON cannot hold.
    """
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(found, Mapping):
        raise AdapterError("config", "must be a mapping, as in adapter_config.json, or a LoraConfig", config)
    try:
        text = json.dumps(dict(found), default=_listed)
    except (TypeError, ValueError, RecursionError) as error:
        raise AdapterError("config", f"cannot be written as JSON: {error}") from None
    return parse_json(text.encode(), "config")


def _listed(value: Any) -> Any:
    """PEFT keeps names of modules in sets."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")
