"""A matcher as a process on a real socket: started, asked, killed, started again."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from matcher_kit import Change, ask, page, segments_of

from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.channels import open_channel
from services.common.errors import reason_of

SECONDS = 60.0


class Process:
    def __init__(self, folder: Path, name: str = "matcher", *flags: str) -> None:
        self.target = f"unix:{folder}/{name}"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.matcher", "--listen", self.target, "--drain-seconds", "0"]
        self._process = subprocess.Popen([*command, *self._flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.channel = open_channel(self.target)
        grpc.channel_ready_future(self.channel).result(timeout=SECONDS)
        self.stub: Any = matcher_pb2_grpc.MatcherServiceStub(self.channel)
        give_up_at = time.monotonic() + SECONDS
        while not self._is_ready():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)

    def _is_ready(self) -> bool:
        try:
            self.stub.Match(ask([0]), timeout=SECONDS)
        except grpc.RpcError as error:
            if reason_of(error) != "NOT_READY":
                raise
            return False
        return True

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=SECONDS)
            self.channel.close()
            self._process = None

    def publish(self, *changes: Change, **where: Any) -> matcher_pb2.PublishResponse:
        return self.stub.Publish(page(changes, **where), timeout=SECONDS)

    def match(self, request: matcher_pb2.MatchRequest) -> matcher_pb2.MatchResponse:
        return self.stub.Match(request, timeout=SECONDS)

    def found(self, tokens: list[int], **fields: Any) -> list[tuple[int, int, str]]:
        segments = segments_of(self.match(ask(tokens, **fields)))
        return [(segment.query_position, segment.length, segment.document) for segment in segments]

    @property
    def stats(self) -> matcher_pb2.GetMatcherStatsResponse:
        return self.stub.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(with_digest=True), timeout=SECONDS)
