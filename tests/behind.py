"""Two verifier processes behind an nginx of the test's own, from deploy/nginx.conf.example."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "deploy" / "nginx.conf.example"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def configuration(folder: Path, ports: Sequence[int], listen: int) -> str:
    """The example with other addresses, files and servers, and what a whole file needs around."""
    text = EXAMPLE.read_text()
    text = text.replace("listen 8443 ssl", f"listen 127.0.0.1:{listen} ssl")
    text = text.replace("/etc/outrider/", f"{folder}/")
    server = re.findall(r"^ *server 127.0.0.1:8771.*\n", text, re.M)[0]
    text = re.sub(r"^ *server 127.0.0.1:877\d.*\n", "", text, flags=re.M)
    servers = "".join(server.replace("8771", str(port)) for port in ports)
    text = text.replace("consistent;\n", f"consistent;\n{servers}", 1)
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}{text}\n}}\n"
    )


@contextlib.contextmanager
def nginx(folder: Path, ports: Sequence[int]) -> Iterator[int]:
    """The port where it listens, with the certificate `cloud.pem` in the folder."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    certificate(folder)
    listen = free_port()
    file = folder / "nginx.conf"
    file.write_text(configuration(folder, ports, listen))
    command = [program, "-c", str(file), "-p", str(folder), "-e", str(folder / "error.log")]
    running = subprocess.Popen(command)
    try:
        for _ in range(500):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", listen), timeout=1.0).close()
                break
            assert running.poll() is None, (folder / "error.log").read_text()
            time.sleep(0.02)
        yield listen
    finally:
        running.terminate()
        running.wait()


def certificate(folder: Path) -> None:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 "
        f"-keyout {folder}/cloud.key -out {folder}/cloud.pem"
    )
    subprocess.run(command.split(), check=True, capture_output=True)


def installed() -> bool:
    return bool(shutil.which("nginx") or Path("/usr/sbin/nginx").exists())
