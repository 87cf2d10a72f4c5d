"""`python -m dflash_chat`: the same as `dflash-chat`."""

from dflash_chat.main import main

if __name__ == "__main__":
    main()
