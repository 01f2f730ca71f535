"""Envelopes open with their key, for their message, unaltered; and with nothing else."""

from __future__ import annotations

import base64
import json
import pickle

import pytest

from airflow_provider_queen.client.encryption import KEYS_VARIABLE, Keyring
from airflow_provider_queen.exceptions import EncryptionError

OLD, NEW = Keyring.generate_key(), Keyring.generate_key()
PAYLOAD = '{"card":"4111 1111"}'


def test_what_was_encrypted_comes_back() -> None:
    keyring = Keyring([NEW])
    envelope = keyring.encrypt(PAYLOAD, "orders", "t-1")
    assert json.loads(envelope).keys() == {"queen", "kid", "nonce", "data"}
    assert "4111" not in envelope
    assert keyring.decrypt(envelope, "orders", "t-1") == PAYLOAD


def test_the_same_payload_never_looks_the_same() -> None:
    keyring = Keyring([NEW])
    assert keyring.encrypt(PAYLOAD, "orders", "t-1") != keyring.encrypt(PAYLOAD, "orders", "t-1")


def test_rotation_encrypts_with_the_newest_and_decrypts_with_all() -> None:
    before = Keyring([OLD]).encrypt(PAYLOAD, "orders", "t-1")
    both = Keyring.parse(f"{NEW}, {OLD}")
    assert both.decrypt(before, "orders", "t-1") == PAYLOAD
    after = both.encrypt(PAYLOAD, "orders", "t-2")
    assert Keyring([NEW]).decrypt(after, "orders", "t-2") == PAYLOAD
    with pytest.raises(EncryptionError, match="not among the 1 keys"):
        Keyring([OLD]).decrypt(after, "orders", "t-2")


@pytest.mark.parametrize(
    ("queue_name", "transaction_id"), [("orders", "t-2"), ("mails", "t-1"), ("orders\0t", "-1")]
)
def test_an_envelope_belongs_to_its_message(queue_name: str, transaction_id: str) -> None:
    envelope = Keyring([NEW]).encrypt(PAYLOAD, "orders", "t-1")
    with pytest.raises(EncryptionError, match="belongs to another message or queue"):
        Keyring([NEW]).decrypt(envelope, queue_name, transaction_id)


@pytest.mark.parametrize("part", ["nonce", "data"])
def test_an_altered_envelope_does_not_open(part: str) -> None:
    envelope = json.loads(Keyring([NEW]).encrypt(PAYLOAD, "orders", "t-1"))
    raw = bytearray(base64.b64decode(envelope[part]))
    raw[0] ^= 1
    envelope[part] = base64.b64encode(bytes(raw)).decode()
    with pytest.raises(EncryptionError, match="altered"):
        Keyring([NEW]).decrypt(json.dumps(envelope), "orders", "t-1")


@pytest.mark.parametrize(
    "envelope",
    [
        "{}",
        "[]",
        "7",
        "null",
        '"text"',
        '{"queen":2}',
        '{"queen":1,"kid":"x"}',
        '{"queen":1,"kid":"x","nonce":"!","data":"!"}',
    ],
)
def test_what_is_no_envelope_is_refused(envelope: str) -> None:
    with pytest.raises(EncryptionError, match="'t-1' of queue 'orders'"):
        Keyring([NEW]).decrypt(envelope, "orders", "t-1")


def test_a_short_nonce_or_cipher_text_is_refused() -> None:
    keyring = Keyring([NEW])
    envelope = json.loads(keyring.encrypt(PAYLOAD, "orders", "t-1"))
    for part in ("nonce", "data"):
        with pytest.raises(EncryptionError, match="does not decrypt"):
            keyring.decrypt(json.dumps({**envelope, part: ""}), "orders", "t-1")


@pytest.mark.parametrize("key", ["", "short", "!" * 44, base64.b64encode(b"x" * 31).decode(), "ä" * 43])
def test_a_bad_key_is_refused_and_not_named(key: str) -> None:
    with pytest.raises(EncryptionError, match="key number 2 is not 32 bytes") as caught:
        Keyring([NEW, key])
    assert not key or key not in str(caught.value)


def test_no_key_at_all_is_an_error() -> None:
    with pytest.raises(EncryptionError, match="'orders' is encrypted and there is no key"):
        Keyring([]).encrypt(PAYLOAD, "orders", "t-1")


def test_keys_come_from_the_environment() -> None:
    keyring = Keyring.from_environment({KEYS_VARIABLE: f"{NEW},{OLD}"})
    assert keyring is not None
    assert keyring.decrypt(Keyring([OLD]).encrypt(PAYLOAD, "q", "t"), "q", "t") == PAYLOAD
    assert Keyring.from_environment({}) is None


def test_a_keyring_shows_and_gives_no_key() -> None:
    keyring = Keyring([NEW])
    assert NEW not in repr(keyring)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(keyring)
