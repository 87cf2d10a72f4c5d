#!/usr/bin/env python3
"""A web page in headless Chromium that talks to a server: from one origin allowed, else refused.

The page streams an answer with fetch. Needs `chromium` (Debian's package) or the browser that
--browser names. Exit code 1 where the page that was named does not work, or the other does.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import dflash_mlx  # noqa: E402, F401 - before anything imports mlx
from support.serving import MODEL, actor_pair, serving  # noqa: E402

WORDS = "Once upon a time there was an answer."
PAGE = """<!doctype html><title>page</title><script>
const tell = text => fetch("/told", {method: "POST", body: text});
(async () => {
  try {
    const response = await fetch("SERVER/v1/chat/completions", {method: "POST",
      headers: {"Content-Type": "application/json", "Authorization": "Bearer secret"},
      body: JSON.stringify({model: "MODEL", stream: true,
                            messages: [{role: "user", content: "hello"}]})});
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "", text = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      held += value;
      const lines = held.split("\\n");
      held = lines.pop();
      for (const line of lines)
        if (line.startsWith("data: {"))
          text += JSON.parse(line.slice(6)).choices[0].delta.content || "";
    }
    tell("said: " + text);
  } catch (error) { tell("refused: " + error); }
})();
</script>"""


def site(server: str, told: Queue) -> ThreadingHTTPServer:
    """A place that shows the page and hears what became of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            body = PAGE.replace("SERVER", server).replace("MODEL", MODEL).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:  # noqa: N802
            told.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    place = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=place.serve_forever, daemon=True).start()
    return place


def visit(browser: str, address: str, told: Queue, folder: Path) -> str:
    """What the page at `address` tells."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    running = subprocess.Popen(
        [browser, *words, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return told.get(timeout=60)
    except Empty:
        return "nothing"
    finally:
        running.kill()
        running.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--browser", default="chromium")
    arguments = parser.parse_args()
    told: Queue = Queue()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        pair = actor_pair(folder / "actor", lambda prompt: WORDS)
        allowed = site("", told)
        origin = f"http://127.0.0.1:{allowed.server_port}"
        with serving(pair, allow_origin=(origin,), key="secret") as server:
            allowed.RequestHandlerClass = site(server.url, told).RequestHandlerClass
            other = site(server.url, told)
            good = visit(arguments.browser, origin, told, folder / "good")
            address = f"http://127.0.0.1:{other.server_port}"
            bad = visit(arguments.browser, address, told, folder / "bad")
    print(f"page that was named: {good}\nanother page: {bad}")
    return 0 if good == f"said: {WORDS}" and bad.startswith("refused: ") else 1


if __name__ == "__main__":
    sys.exit(main())
