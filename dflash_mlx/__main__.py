"""`python -m dflash_mlx`: which commands there are."""

import sys

COMMANDS = """\
dflash-chat                      the chat; with a question, one answer
dflash-chat models, clean        what is on the disk, to download or to remove
dflash-serve                     a server that speaks OpenAI's, Anthropic's and Ollama's APIs
python -m dflash_mlx.generate    one answer, with every setting and figures as JSON
python -m dflash_mlx.benchmark   methods compared over many prompts
python -m dflash_mlx.convert     models converted and quantised
python -m dflash_mlx.doctor      what this machine is, and whether a pair fits
python -m dflash_mlx.corpus      answers collected, to train a draft model
python -m dflash_mlx.train       a draft model trained
python -m kernels_metal.sweep    every Metal kernel against its reference

Each says more with --help."""

if __name__ == "__main__":
    print(COMMANDS)
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        print(f"\ndflash_mlx: there is no {sys.argv[1]} here; type one of these", file=sys.stderr)
        sys.exit(2)
