"""Typed settings: defaults, then a TOML file, then the environment, then flags.

A service declares a subclass of `ServiceSettings`; each field's description tells unit and reason.
A wrong setting is refused at start in one line that names the setting, the value and what is
allowed (`load_settings`), never with a traceback; an unknown one is refused too.
"""

import argparse
import os
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """Settings that every service has."""

    service: ClassVar[str]

    model_config = SettingsConfigDict(extra="forbid", cli_kebab_case=True, cli_hide_none_type=True)

    listen: str = Field(
        description="Addresses to serve, comma-separated: host:port or unix:/path. Loopback by default: "
        "there is no transport security yet."
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="TCP port of the Prometheus page; 0: none.")
    threads: int = Field(
        16, ge=2, le=256, description="Calls served at once, without session streams; more wait for their turn."
    )
    waiting_calls: int = Field(
        1024,
        ge=0,
        le=100_000,
        description="Calls that may wait: a burst of many engines is no overload. More are refused as OVERLOADED.",
    )
    drain_seconds: float = Field(
        2.0, ge=0, le=300, description="Seconds between not-ready and stop, so that balancers notice; > probe period."
    )
    grace_seconds: float = Field(5.0, ge=0, le=300, description="Seconds that calls in flight get to finish at stop.")
    log_level: str = Field("info", description="debug, info, warning or error.")
    log_json: bool = Field(True, description="One JSON object a line; false: for people.")

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value not in ("debug", "info", "warning", "error"):
            raise ValueError("must be debug, info, warning or error")
        return value

    @field_validator("listen")
    @classmethod
    def _addresses(cls, value: str) -> str:
        for address in value.split(","):
            host, _, port = address.rpartition(":")
            if address.startswith("unix:/") or (host and port.isdigit()):
                continue
            raise ValueError("must be host:port or unix:/absolute/path, comma-separated")
        return value

    @property
    def addresses(self) -> list[str]:
        return self.listen.split(",")


S = TypeVar("S", bound=ServiceSettings)


class _FileSource(PydanticBaseSettingsSource):
    """The service's table of the TOML file, e.g. [matcher]."""

    def __init__(self, settings_cls: type[ServiceSettings], path: Path | None) -> None:
        super().__init__(settings_cls)
        self._values: dict[str, Any] = {}
        if path is not None:
            with path.open("rb") as file:
                self._values = tomllib.load(file).get(settings_cls.service, {})

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        del field
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values


def without_login(value: object) -> object:
    """The value as it may be shown: of a URL no user, password or option."""
    if isinstance(value, str) and "://" in value:
        scheme, _, rest = value.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
    return value


def _refuse(service: str, setting: str, value: object, allowed: str) -> NoReturn:
    sys.exit(f"kvblend {service}: setting {setting} = {without_login(value)!r} is refused: {allowed}")


def _refuse_unknown_environment(settings_cls: type[S], prefix: str) -> None:
    for name in os.environ:
        if name.startswith(prefix) and name[len(prefix) :].lower() not in settings_cls.model_fields:
            known = ", ".join(sorted(settings_cls.model_fields))
            _refuse(settings_cls.service, name, os.environ[name], f"there is no such setting; known: {known}")


def load_settings(settings_cls: type[S], argv: list[str]) -> S:
    """Settings of a service from `--config FILE`, KVBLEND_<SERVICE>_* and flags.

    Exits with one line on a wrong or unknown setting.
    """
    service = settings_cls.service
    prefix = f"KVBLEND_{service.upper()}_"
    before = argparse.ArgumentParser(add_help=False)
    before.add_argument("--config", type=Path)
    known, flags = before.parse_known_args(argv)
    _refuse_unknown_environment(settings_cls, prefix)

    class Loaded(settings_cls):  # type: ignore[misc, valid-type]
        model_config = SettingsConfigDict(
            env_prefix=prefix,
            cli_prog_name=f"kvblend-{service}",
            nested_model_default_partial_update=True,
        )

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], env_settings: PydanticBaseSettingsSource, **_: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            cli: CliSettingsSource[Any] = CliSettingsSource(settings_cls, cli_parse_args=flags)
            return cli, env_settings, _FileSource(cls, known.config)

    Loaded.__doc__ = settings_cls.__doc__
    try:
        return Loaded()
    except ValidationError as error:
        first = error.errors()[0]
        allowed = first["msg"].removeprefix("Value error, ")
        _refuse(service, ".".join(map(str, first["loc"])), first.get("input"), allowed)
    except OSError as error:
        _refuse(service, "config", str(known.config), error.strerror or str(error))
    except tomllib.TOMLDecodeError as error:
        _refuse(service, "config", str(known.config), f"not TOML: {error}")
