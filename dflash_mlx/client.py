"""What the chat needs of this package besides its public names; no promise to anybody else."""

from dflash_mlx.benchmark.quick import RACE_SIDES, RaceResult, RaceStep, comparing, race
from dflash_mlx.cli.user_config import HERE, FaceConfig, UserConfig, checked, parse
from dflash_mlx.core.config import AUTO, DecodeConfig, PairConfig, PrefixConfig, SamplingConfig
from dflash_mlx.core.config import PLAIN as NO_DRAFTS
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import Given, label_in_words, values_given
from dflash_mlx.core.statistics import Observer, Statistics
from dflash_mlx.core.text import amount, counted
from dflash_mlx.drafters.continuations.store import Stores
from dflash_mlx.drafters.methods import (
    check_given,
    family_wanted,
    find_method,
    own_options,
    settle,
    source_of,
)
from dflash_mlx.drafters.methods import choices as method_choices
from dflash_mlx.drafters.methods import sources as token_sources
from dflash_mlx.engine.delta import Delta, SplitText, split_thinking
from dflash_mlx.engine.pair import Capabilities, Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.models.downloads import (
    AvailableModel,
    Download,
    check_memory,
    download_plans,
    memory_here,
)
from dflash_mlx.models.library import (
    GROUPS,
    CacheEntry,
    available_models,
    cache_entries,
    grouped,
    near_names,
    remove_entry,
)
from dflash_mlx.models.load import load_pair
from dflash_mlx.models.names import DEFAULT_MODEL
from dflash_mlx.session.session import Question, Responder, Session, earlier_texts, prefix_cache
from dflash_mlx.session.templates import check_prompt, prompt_tokens
from dflash_mlx.session.worker import Ended, Failed, Job, News, Prefilled, Worker
from dflash_mlx.system.files import replace_text
from dflash_mlx.system.machine import describe_machine, installed_memory, read_speed
from dflash_mlx.system.terminal import for_terminal
from dflash_mlx.vision.album import Album, bare, check_seen, dropped, is_picture, shown
