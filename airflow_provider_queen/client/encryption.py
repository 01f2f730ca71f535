"""Payload encryption: AES-256-GCM, bound to the queue and the transaction id of the message.

A stored envelope is JSON, so that it fits where a payload does: the id of the key, the nonce, the cipher
text. The queue's name and the transaction id are authenticated with it: an envelope that somebody alters, or
moves to another message or queue, does not decrypt.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from airflow_provider_queen.exceptions import EncryptionError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEYS_VARIABLE = "QUEEN_ENCRYPTION_KEYS"
_VERSION = 1
_KEY_BYTES = 32
# 96 random bits: safe for 2^32 messages under one key (NIST SP 800-38D), then rotate.
_NONCE_BYTES = 12


class Keyring:
    """Keys by their ids: the first one encrypts, every one decrypts. Never prints a key.

    :param keys: each 32 bytes as URL-safe base64, newest first
    """

    __slots__ = ("_ciphers", "_newest")

    def __init__(self, keys: Sequence[str] = ()) -> None:
        # Each process that imports the client would pay for this import; few have keys.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._ciphers: dict[str, AESGCM] = {}
        for position, text in enumerate(keys, start=1):
            key = _decode_key(text, position)
            self._ciphers.setdefault(_key_id(key), AESGCM(key))
        self._newest = next(iter(self._ciphers), None)

    @classmethod
    def parse(cls, keys: str | Sequence[str]) -> Keyring:
        """Keys as one text separated by commas, or as a list."""
        return cls(split_keys(keys))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Keyring | None:
        """The keys in ``QUEEN_ENCRYPTION_KEYS``; None where it is not set."""
        keys = (os.environ if environ is None else environ).get(KEYS_VARIABLE)
        return cls.parse(keys) if keys else None

    @staticmethod
    def generate_key() -> str:
        """A new random key, in the form that the options take."""
        return base64.urlsafe_b64encode(os.urandom(_KEY_BYTES)).decode()

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._ciphers)})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a Keyring cannot be pickled: keys stay in the process that was given them")

    def encrypt(self, payload: str, queue_name: str, transaction_id: str) -> str:
        """The envelope for ``payload``, which is JSON text already."""
        if self._newest is None:
            raise EncryptionError(no_key(queue_name))
        nonce = os.urandom(_NONCE_BYTES)
        data = self._ciphers[self._newest].encrypt(
            nonce, payload.encode(), associated_data(queue_name, transaction_id)
        )
        # Written out: json.dumps would cost as much as the encryption, and nothing here needs escaping.
        return (
            f'{{"queen":{_VERSION},"kid":"{self._newest}",'
            f'"nonce":"{base64.b64encode(nonce).decode()}","data":"{base64.b64encode(data).decode()}"}}'
        )

    def decrypt(self, envelope: str, queue_name: str, transaction_id: str) -> str:
        """The payload text in ``envelope``, or ``EncryptionError`` without a word of either."""
        key_id, nonce, data = _open(envelope, queue_name, transaction_id)
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise EncryptionError(
                f"message {transaction_id!r} of queue {queue_name!r} was encrypted with the key {key_id},"
                f" which is not among the {len(self._ciphers)} keys at hand"
            )
        payload = _decrypt(cipher, nonce, data, associated_data(queue_name, transaction_id))
        if payload is None:
            raise EncryptionError(
                f"message {transaction_id!r} of queue {queue_name!r} does not decrypt with its key {key_id}:"
                " it was altered, or belongs to another message or queue"
            )
        return payload


def split_keys(keys: str | Sequence[str]) -> list[str]:
    """Keys as one text separated by commas, or as a list, without what is empty."""
    parts = keys.split(",") if isinstance(keys, str) else [str(part) for part in keys]
    return [part.strip() for part in parts if part.strip()]


def associated_data(queue_name: str, transaction_id: str) -> bytes:
    """What is authenticated beside the payload. JSON, because a plain join could be read in two ways."""
    return json.dumps([queue_name, transaction_id]).encode()


def no_key(queue_name: str) -> str:
    """What to say where a key is needed and there is none."""
    return (
        f"queue {queue_name!r} is encrypted and there is no key: set encryption_keys in the connection's"
        f" extra, or the environment variable {KEYS_VARIABLE}"
    )


def _decode_key(text: object, position: int) -> bytes:
    key = b""
    if isinstance(text, str):
        try:
            key = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            key = b""
    if len(key) != _KEY_BYTES:
        raise EncryptionError(
            f"encryption key number {position} is not {_KEY_BYTES} bytes in URL-safe base64;"
            " Keyring.generate_key() makes one"
        )
    return key


def _key_id(key: bytes) -> str:
    """Names a key without giving it away."""
    return hashlib.sha256(b"queen key id\0" + key).hexdigest()[:16]


def _open(envelope: str, queue_name: str, transaction_id: str) -> tuple[str, bytes, bytes]:
    problem: str | None = None
    try:
        content = json.loads(envelope)
        if content["queen"] == _VERSION:
            nonce = base64.b64decode(content["nonce"], validate=True)
            return str(content["kid"]), nonce, base64.b64decode(content["data"], validate=True)
        problem = "has an envelope of another version"
    except (ValueError, KeyError, TypeError):
        problem = "is marked as encrypted and has no envelope"
    # Outside of the except block: the error that was caught may quote the text.
    raise EncryptionError(f"message {transaction_id!r} of queue {queue_name!r} {problem}")


def _decrypt(cipher: AESGCM, nonce: bytes, data: bytes, bound_to: bytes) -> str | None:
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(nonce, data, bound_to).decode()
    except (InvalidTag, ValueError):
        return None
