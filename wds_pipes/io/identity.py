"""Identify the store that a URL leads to, by its options, the environment and configuration files.

Rules:
1. Every setting distinguishes stores, except those that are known to have no effect. A shard that
   is fetched again only costs time; a shard from the wrong store is wrong data.
2. Credentials are not part of a store's identity, so that what is stored is found with new ones.
   But for an S3 service other than Amazon's, the name of the key (the access key ID) is part of it:
   there each account may have its own bucket of the same name.
3. No network request is made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from wds_pipes.io.urls import identify, is_secret, links_of

# What fsspec's file systems call the ETag of an object: of Hugging Face and GitHub, that of git.
OF_CONTENT = ("ETag", "etag", "blob_id", "sha")
# Options of fsspec's file systems that do not change which store is meant.
_WITHOUT_EFFECT = re.compile(
    r"__origins__|anon|asynchronous|loop|skip_instance_cache|use_listings_cache|listings_expiry_time|max_paths|(default_)?(block_size|cache_type|fill_cache)|cache_options"
    r"|cache_regions|config_kwargs|max_concurrency|requester_pays|timeouts?|retries|use_ssl|local_expiry_check|fixed_upload_size|version_aware"
    r"|session_kwargs|simple_links|same_scheme|consistency|access|cache_timeout|check_connection|secure_serialize|get_client"
)
# Environment variables that say where a store is.
_ENVIRONMENT = {
    "gs": ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_UNIVERSE_DOMAIN"),
    "ais": ("AIS_ENDPOINT",),
    "hf": ("HF_ENDPOINT",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"),
    "oss": ("OSS_ENDPOINT",),
    "hdfs": ("HADOOP_CONF_DIR",),
}
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az", "webhdfs": "hdfs", "https": "http"}


def identify_store(url: str, options: Mapping[str, Any]) -> str:
    """A text that identifies the store of ``url``.

    It differs for stores in which the same URL names different objects. Hash it; never show it.

    Args:
        url: the URL of a shard there, which may be chained.
        options: storage_options for fsspec.
    """
    from fsspec.config import conf

    protocols = protocols_of(url)
    described: list[Any] = []
    for protocol in protocols:
        name = _ALIASES.get(protocol, protocol)
        own = options.get(protocol) if len(protocols) > 1 else options
        settings: dict[str, Any] = {}
        for alias in _names(name, protocol):
            settings |= conf.get(alias, {})
        settings |= own if isinstance(own, Mapping) else {}
        environment = [_value(os.environ.get(variable), variable) for variable in _ENVIRONMENT.get(name, ())]
        described.append([name, _s3(settings) if name == "s3" else _plain(settings), environment])
    return json.dumps([described, user_of(url)], sort_keys=True)


def _names(*names: str) -> Sequence[str]:
    """The protocols whose configuration a file system of fsspec reads, in its order: all its
    names.
    """
    from fsspec.core import get_filesystem_class

    try:
        kind: Any = get_filesystem_class(names[0])
    except (ImportError, ValueError):
        return names
    return [kind.protocol] if isinstance(kind.protocol, str) else list(kind.protocol)


def protocols_of(url: str) -> list[str]:
    """The protocols of a URL: several if it is chained."""
    return [part.partition("://")[0] for part in links_of(url)]


def user_of(url: str) -> str:
    """The user in a URL if each user has separate files there; otherwise "".

    In URLs of S3 there is no such user, in URLs of HTTP only one with a password.
    """
    found = re.match(r"([^/]*)://([^/?#@:]*)(:[^/?#@]*)?@", url)
    log_in = (
        found is not None
        and not found[1].endswith(("s3", "s3a"))
        and (found[3] is not None or not found[1].endswith(("http", "https")))
    )
    return found[2] if found is not None and log_in else ""


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without credentials, as JSON values."""
    kept = {str(name): value for name, value in options.items() if not _WITHOUT_EFFECT.fullmatch(str(name))}
    return {
        name: _value(value, name) for name, value in kept.items() if name == "connection_string" or not is_secret(name)
    }


def _value(value: Any, name: str) -> Any:
    """A JSON value for an option that is the same in all processes."""
    if isinstance(value, str) and name.lower().endswith("connection_string"):
        return [part for part in value.split(";") if not is_secret(part.partition("=")[0])]
    if isinstance(value, str):
        return identify(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, (list, tuple)):
        return [_value(item, name) for item in value]
    if isinstance(value, (bytes, bytearray, os.PathLike)):
        return repr(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(getattr(value, "storage_options", None), Mapping):  # a file system
        return [str(getattr(value, "protocol", "")), _plain(value.storage_options)]
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


# S3: the endpoint and the key, in the order in which s3fs and botocore look for them


def _s3(options: Mapping[str, Any]) -> list[Any]:
    client = options.get("client_kwargs") or {}
    config = options.get("config_kwargs") or {}
    session, scoped = _session(options)
    key = client.get("aws_access_key_id") or options.get("key") or options.get("username")
    if key is None:
        of_profile = scoped.get("aws_access_key_id")
        key = of_profile if options.get("profile") else os.environ.get("AWS_ACCESS_KEY_ID") or of_profile
    if options.get("anon"):
        key = None
    endpoint = client.get("endpoint_url") or options.get("endpoint_url")
    ignored = config.get("ignore_configured_endpoint_urls")
    if ignored is None and session is not None:
        ignored = session.get_config_variable("ignore_configured_endpoint_urls")
    if not endpoint and not ignored:
        services = (
            session.full_config.get("services", {}).get(scoped.get("services"), {}) if session is not None else {}
        )
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = endpoint or services.get("s3", {}).get("endpoint_url") or scoped.get("endpoint_url")
    more = _plain({name: value for name, value in options.items() if name not in _OF_S3})
    if endpoint and not re.search(r"\.amazonaws\.com(\.cn)?(:\d+)?/*$", endpoint):
        return [identify(endpoint).rstrip("/"), key, more]
    region = client.get("region_name") or (session.get_config_variable("region") if session is not None else None)
    apart = re.search(
        r"(^|[./])(cn|us-gov|us-iso[a-z]?|eu-isoe|eusc)-", endpoint or region or ""
    )  # each of these partitions has its own buckets; in all others a name is one bucket
    return ["aws", apart[2] if apart else "", more]


_OF_S3 = ("client_kwargs", "endpoint_url", "key", "username", "secret", "password", "token", "profile", "session")


def _session(options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """A session of botocore, and what the configuration files say about its profile."""
    try:
        session = options.get("session") or import_module("botocore.session").Session(profile=options.get("profile"))
        return session, session.get_scoped_config()
    except Exception:  # reading will report what is wrong
        return None, {"services": None, "endpoint_url": str(options.get("profile") or os.environ.get("AWS_PROFILE"))}
