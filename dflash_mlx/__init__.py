"""Lossless speculative decoding with block-diffusion drafters on MLX; README.md has examples.

These are the public names: the chat is built from them alone. Modules below may change.
"""

from dflash_mlx.system import startup

startup.begin()  # first, so that Ctrl+C ends a command quietly while it is still importing

from dflash_mlx.system import blas  # noqa: E402

blas.preload()  # must come before anything imports mlx

from dflash_mlx.benchmark.quick import BenchStep, bench, save_bench, what_pays  # noqa: E402
from dflash_mlx.benchmark.race import SIDES as RACE_SIDES  # noqa: E402
from dflash_mlx.benchmark.race import RaceResult, RaceStep, race  # noqa: E402
from dflash_mlx.core.amounts import amount  # noqa: E402
from dflash_mlx.core.config import (  # noqa: E402
    AUTO,
    DecodeConfig,
    PairConfig,
    PrefixConfig,
    SamplingConfig,
    StructureConfig,
)
from dflash_mlx.core.config import PLAIN as NO_DRAFTS  # noqa: E402
from dflash_mlx.core.errors import DFlashError  # noqa: E402
from dflash_mlx.core.observer import Observer, RoundTimer  # noqa: E402
from dflash_mlx.core.option import Given, label_in_words, values_given  # noqa: E402
from dflash_mlx.core.statistics import Statistics  # noqa: E402
from dflash_mlx.drafters.method import TokenSource  # noqa: E402
from dflash_mlx.drafters.methods import (  # noqa: E402
    check_given,
    draws_drafts,
    find_method,
    needs_drafter,
    own_options,
    settle,
)
from dflash_mlx.drafters.methods import choices as method_choices  # noqa: E402
from dflash_mlx.drafters.methods import sources as token_sources  # noqa: E402
from dflash_mlx.engine.delta import Answer, Delta  # noqa: E402
from dflash_mlx.engine.pair import Capabilities, Pair  # noqa: E402
from dflash_mlx.engine.parity import Difference, first_difference  # noqa: E402
from dflash_mlx.engine.prefixes import PrefixCache  # noqa: E402
from dflash_mlx.engine.text import SplitText, ThinkingReader, split_thinking  # noqa: E402
from dflash_mlx.models.available import (  # noqa: E402
    AvailableModel,
    available_memory,
    available_models,
    check_memory,
    memory_needed,
    near_names,
)
from dflash_mlx.models.kept import Kept, kept_files, remove_kept  # noqa: E402
from dflash_mlx.models.load import load, load_pair  # noqa: E402
from dflash_mlx.models.names import DEFAULT_MODEL  # noqa: E402
from dflash_mlx.models.offers import Download, Offer, offers  # noqa: E402
from dflash_mlx.session.responder import Question, Responder, prefix_cache  # noqa: E402
from dflash_mlx.session.scheduler import Scheduler  # noqa: E402
from dflash_mlx.session.session import Session, generate, stream  # noqa: E402
from dflash_mlx.session.templates import check_prompt, prompt_tokens  # noqa: E402
from dflash_mlx.session.worker import Ended, Failed, Job, News, Prefilled, Worker  # noqa: E402
from dflash_mlx.system.files import replace_text  # noqa: E402
from dflash_mlx.system.terminal import for_terminal  # noqa: E402

__all__ = [
    "AUTO",
    "DEFAULT_MODEL",
    "Answer",
    "AvailableModel",
    "BenchStep",
    "Capabilities",
    "DFlashError",
    "DecodeConfig",
    "Delta",
    "Difference",
    "Download",
    "Ended",
    "Failed",
    "Job",
    "Kept",
    "NO_DRAFTS",
    "News",
    "Observer",
    "Offer",
    "Pair",
    "PairConfig",
    "PrefixCache",
    "PrefixConfig",
    "Prefilled",
    "Question",
    "RACE_SIDES",
    "RaceResult",
    "RaceStep",
    "Responder",
    "RoundTimer",
    "SamplingConfig",
    "Session",
    "Scheduler",
    "SplitText",
    "Statistics",
    "StructureConfig",
    "ThinkingReader",
    "TokenSource",
    "Worker",
    "amount",
    "available_memory",
    "available_models",
    "bench",
    "Given",
    "check_given",
    "label_in_words",
    "values_given",
    "own_options",
    "check_memory",
    "check_prompt",
    "draws_drafts",
    "find_method",
    "first_difference",
    "for_terminal",
    "generate",
    "kept_files",
    "load",
    "load_pair",
    "memory_needed",
    "method_choices",
    "near_names",
    "needs_drafter",
    "offers",
    "prefix_cache",
    "prompt_tokens",
    "race",
    "remove_kept",
    "replace_text",
    "save_bench",
    "settle",
    "split_thinking",
    "stream",
    "token_sources",
    "what_pays",
]
