"""Detection and hiding of secrets in strings; stateless. See also `accel_nb.runtime.process.secrets`.

Secrets are tokens in the formats of common services, user information and paths of webhooks in URLs, private keys, and
values of names such as ``password``, ``api_key`` or ``hf_token``.
"""

from __future__ import annotations

import re

HIDDEN = "***"
"""The replacement of a secret."""

_NAMES = (
    r"(?:(?:api|access|secret|private|account|signing|encryption|shared)[_-]?key(?:[_-]id)?"
    r"|token|secret|passw(?:or)?d|passphrase|credentials?|authorization|signature)"
)
_SECRET_NAME = re.compile(rf"(?i)(?:^|[_\W]){_NAMES}(?:$|[_\W])")
_SECRET_FLAG = re.compile(rf"(?i)^-(?:.*[_\W])?{_NAMES}(?:[_-](?:value|text|v?\d+))?$")
_SPECIAL_TOKEN = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\s*")
"""Special tokens of vocabularies: ``pad_token="<pad>"`` is not a secret."""

_TOKEN_FORMATS = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|dckr_pat_[\w-]{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w.-]{20,}"  # AWS, Google
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r")"
)
_USER_INFO = re.compile(r"(?<=://)[^\s/?#\"'<>]+@")
_WEBHOOK = re.compile(
    r"(?i)(://hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/|://discord(?:app)?\.com/api/webhooks/)[^\s\"'<>]+"
)
_HEADER = re.compile(r"(?i)\b(bearer|basic)(\s+)[\w.~+/=-]{8,}")
_ASSIGNMENT = re.compile(
    rf"(?i)(?<![A-Za-z0-9])(?P<name>{_NAMES})(?P<between>[\"']?\s{{0,3}}[=:]\s{{0,3}})"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&\"'(){}\[\]<>]+(?![\w(\[.]))"
)
_FLAG = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]{0,60})(\s{1,3})[^\s-]\S*")


def names_secret(name: str) -> bool:
    """Return whether a name is typical of secrets: ``hf_token`` is, ``num_tokens`` and ``key`` are not."""
    return _SECRET_NAME.search(name) is not None


def flag_takes_secret(flag: str) -> bool:
    """Return whether the argument of a flag is a secret: that of ``--hf-token`` is, of ``--per-token-loss`` is not."""
    return _SECRET_FLAG.search(flag) is not None


def is_secret(name: str, value: object) -> bool:
    """Return whether a named value is a secret: a text with such a name that is not a special token of a vocabulary."""
    return isinstance(value, str) and names_secret(name) and _SPECIAL_TOKEN.fullmatch(value) is None


def hide_secrets(text: str) -> str:
    """Return the text with secrets replaced by `HIDDEN`. Takes time linear in the text's length."""
    text = _USER_INFO.sub(f"{HIDDEN}@", text)
    text = _TOKEN_FORMATS.sub(HIDDEN, text)
    text = _WEBHOOK.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _FLAG.sub(_hide_argument, text)
    return _ASSIGNMENT.sub(_hide_assigned_value, text)


def _hide_argument(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{HIDDEN}" if flag_takes_secret(found[1]) else found[0]


def _hide_assigned_value(found: re.Match[str]) -> str:
    value = found["value"]
    quote = value[0] if value[0] in "\"'" else ""
    inner = value[1:-1] if quote else value
    if _SPECIAL_TOKEN.fullmatch(inner) or inner.lower() in ("none", "null", "true", "false", "bearer", "basic"):
        return found[0]
    if not quote and len(inner) < 8 and "=" not in found["between"]:
        return found[0]  # prose such as "the token: what it is"
    return f"{found['name']}{found['between']}{quote}{HIDDEN}{quote}"
