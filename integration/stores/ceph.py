"""One Ceph cluster in memory: a monitor, one store of objects, the S3 gateway. Starts in about 10 s."""

from __future__ import annotations

import subprocess
import uuid
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from integration.stores.daemons import daemon, free_port, listens, wait_until
from integration.stores.debian import require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
PACKAGES = ("ceph-common", "ceph-mon", "ceph-osd", "radosgw")
KEY = "testtest"
OSD_STARTS = 5

CONFIG = """\
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon_port}/0]
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 0
osd crush chooseleaf type = 0
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon max pg per osd = 1000
run dir = {root}
admin socket = {root}/$cluster-$name.asok
log file = /dev/null
pid file = {root}/$name.pid
public addr = 127.0.0.1
cluster addr = 127.0.0.1
[mon.a]
mon data = {root}/mon
[osd.0]
osd data = {root}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw_port}
"""


@contextmanager
def gateway(root: Path) -> Iterator[str]:
    """The URL of a running S3 gateway, whose one user has :data:`KEY` for both keys. Needs about 300 MB.

    Raises:
        UnavailableError: Ceph is not installed and cannot be.
        RuntimeError: It does not start; with its output.
    """
    require(PROGRAMS, PACKAGES)
    cluster = _Cluster(root)
    with ExitStack() as stack:
        cluster.start_monitor(stack)
        cluster.start_store(stack)
        cluster.run(
            *("radosgw-admin", "user", "create", "--uid=test", "--display-name=test"),
            *(f"--access-key={KEY}", f"--secret-key={KEY}"),
        )
        yield cluster.start_gateway(stack)


class _Cluster:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._fsid = str(uuid.uuid4())
        self._mon_port, self._rgw_port = free_port(), free_port()
        for name in ("mon", "osd"):
            (root / name).mkdir()
        self._config = root / "ceph.conf"
        self._config.write_text(
            CONFIG.format(fsid=self._fsid, root=root, mon_port=self._mon_port, rgw_port=self._rgw_port)
        )

    def run(self, *command: str) -> str:
        program, *arguments = command
        done = subprocess.run(
            [program, "--conf", str(self._config), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def _daemon(self, stack: ExitStack, *command: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._root / f"{command[0]}.log"
        program, *arguments = command
        started = daemon([program, "--conf", str(self._config), "--foreground", *arguments], log)
        return stack.enter_context(started), log

    def start_monitor(self, stack: ExitStack) -> None:
        monmap, address = str(self._root / "monmap"), f"[v1:127.0.0.1:{self._mon_port}]"
        subprocess.run(
            ["monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", address, monmap],
            check=True,
            capture_output=True,
        )
        self.run("ceph-mon", "--mkfs", "--id", "a", "--monmap", monmap)
        process, log = self._daemon(stack, "ceph-mon", "--id", "a")
        wait_until(lambda: listens(self._mon_port), process, log)
        wait_until(self._answers, process, log)

    def _answers(self) -> bool:
        """True when the monitor takes commands: on a busy machine seconds after it listens."""
        try:
            self.run("ceph", "osd", "stat")
        except RuntimeError:
            return False
        return True

    def start_store(self, stack: ExitStack) -> None:
        osd = str(uuid.uuid4())
        self.run("ceph", "osd", "new", osd)
        self.run("ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", osd)
        for attempt in range(OSD_STARTS):
            process, log = self._daemon(stack, "ceph-osd", "--id", "0")
            try:
                wait_until(lambda: "1 up" in self.run("ceph", "osd", "stat"), process, log)
            except RuntimeError:
                # It may ask the monitor before it has been told the cluster's id, and gives up then.
                if attempt == OSD_STARTS - 1:
                    raise
            else:
                return

    def start_gateway(self, stack: ExitStack) -> str:
        process, log = self._daemon(stack, "radosgw", "--name", "client.rgw")
        wait_until(lambda: listens(self._rgw_port), process, log)
        return f"http://127.0.0.1:{self._rgw_port}"
