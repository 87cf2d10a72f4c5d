"""Other programs that decode with MLX, measured beside this one; `../compare_peers.py` begins here.

`table.py` says who they are, `environment.py` installs them, `pair.py` writes the weights that all
read, `servers.py` asks servers, `alone.py` one request after the other, `report.py` tells.
"""
