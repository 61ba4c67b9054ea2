"""What a worker is told by its environment."""

from typing import Literal, Self

from pydantic import ByteSize, Field, model_validator

from octavo.models import DEFAULT, FORMS
from octavo.settings import Addresses, ModelsSettings, ServiceSettings


class WorkerSettings(ServiceSettings, ModelsSettings):
    """Variables OCTAVO_*; see octavo.settings."""

    cache_manager: Addresses = Field(
        default=("127.0.0.1:7100",),
        description="host:port of the cache manager; of several, separated by commas, the worker attends one, and the "
        "next when that one fails",
    )
    worker_id: str | None = Field(
        default=None, max_length=128, description="what the fleet calls this worker; unset: drawn at random"
    )
    model: str = Field(default=DEFAULT, description=FORMS)
    model_road: Literal["auto", "fast", "generic"] = Field(
        default="auto",
        description="fast: our own layers, for models of the Llama family; generic: transformers' own; auto: the fast "
        "one where it knows the model",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="of weights and activations; auto: bfloat16, but float32 on a CPU without "
        "instructions for it (AVX512_BF16, AMX)",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"] = Field(
        default="auto", description="of the KV pool; auto: the model's. float8 holds twice as many tokens as bfloat16"
    )
    deterministic: bool = Field(
        default=False,
        description="compute a sequence in the same way, to the bit, whatever runs beside it and however its prompt is "
        "cut, so that a hit equals a miss in bfloat16 too; models that cannot take the fast road are refused. Slower: "
        "products take 32 rows at a time, each token attends by itself, and on CUDA decodes do not share the reading "
        "of common blocks",
    )
    threads: int = Field(default=0, ge=0, description="CPU threads of the model; 0: one a core")
    kv_memory: ByteSize | None = Field(
        default=None,
        gt=0,
        description="bytes of the KV pool, as 2GiB; unset: 512MiB on a CPU, on a GPU what is left beside the model "
        "and a largest step",
    )
    gpu_memory_share: float = Field(
        default=0.9, gt=0, le=1, description="how far a GPU may be taken, where the pool gets what is left of it"
    )
    block_size: int = Field(default=16, ge=1, le=4096, description="positions a block")
    max_step_tokens: int = Field(default=512, ge=1, description="tokens computed in one step, at most")
    max_running: int = Field(default=64, ge=1, description="sequences that hold blocks at once, at most")
    speculate: Literal["off", "ngram", "model"] = Field(
        default="off",
        description="guess tokens and verify several in one step; ngram: what followed the newest where they stood "
        "before; model: those of `draft_model`. The draws stay the same. Not with `deterministic`",
    )
    draft_model: str | None = Field(
        default=None, description="a small model with the tokenizer of `model`, named likewise; fetched beforehand"
    )
    draft_memory: ByteSize = Field(
        default=ByteSize(128 << 20), gt=0, validate_default=True, description="bytes of its own KV pool, as 128MiB"
    )
    max_waiting: int = Field(default=4096, ge=1, description="further sequences that wait for a place, at most")
    max_unread_reports: int = Field(
        default=1024, ge=1, description="steps a gateway may lag behind before its stream is ended"
    )
    cuda_graphs: bool = Field(
        default=True, description="record decode steps when the worker starts, on CUDA, and run them from that"
    )
    overlap: bool = Field(
        default=True,
        description="ask the cache manager for a step while the one before runs; false: in between, as one looks for "
        "an error",
    )
    exchange_seconds: float = Field(
        default=5.0, gt=0, description="seconds without an answer after which the cache manager counts as lost"
    )

    @model_validator(mode="after")
    def _guesses_fit(self) -> Self:
        if self.deterministic and self.speculate != "off":
            raise ValueError(
                f"speculate is {self.speculate} and deterministic is true: how far it guesses depends on what else runs"
            )
        if (self.speculate == "model") != (self.draft_model is not None):
            raise ValueError(
                f"speculate is {self.speculate} and draft_model {self.draft_model}: one goes with the other"
            )
        return self
