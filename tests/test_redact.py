"""Secrets are replaced by kind, what agents write about code stays, and JSON stays JSON.

No key stands here as a literal: prefixes and bodies are joined at run time, so that scanners of
this repository find nothing.
"""

import itertools
import json
import random
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow_scripts.lib.redact import find, redact, redact_text
from workflow_scripts.lib.secret_rules import is_secret_value, load

LETTERS_AND_DIGITS = string.ascii_letters + string.digits
BASE64 = LETTERS_AND_DIGITS + "+/"
URL_SAFE = LETTERS_AND_DIGITS + "-_"


def made(alphabet: str, size: int, seed: int = 0) -> str:
    """Random characters with a digit among them; never a sign at an end."""
    body = "".join(random.Random(f"{alphabet}{size}{seed}").choices(alphabet, k=size - 2))
    return f"k{body}7" if "k" in alphabet else f"{alphabet[0]}{body}7"


KEY = made(LETTERS_AND_DIGITS, 32)
PASSWORD = made(LETTERS_AND_DIGITS, 8) + "!" + made(LETTERS_AND_DIGITS, 7)
JWT = "ey" + "J" + ".eyJ".join([made(URL_SAFE, 30), made(URL_SAFE, 60)]) + "." + made(URL_SAFE, 43)
PEM_LINES = [made(BASE64, 64, seed) for seed in range(12)]


def pem(kind: str = "RSA ") -> str:
    """A block that is no key."""
    dashes = "-" * 5
    return "\n".join(
        [
            f"{dashes}BEGIN {kind}PRIVATE KEY{dashes}",
            *PEM_LINES,
            f"{dashes}END {kind}PRIVATE KEY{dashes}",
        ]
    )


TOKENS = [
    ("aws-key", "AK" + "IA" + made(string.ascii_uppercase + string.digits, 16)),
    ("aws-key", "AS" + "IA" + made(string.ascii_uppercase + string.digits, 16)),
    ("github-token", "gh" + "p_" + made(LETTERS_AND_DIGITS, 36)),
    ("github-token", "gh" + "s_" + made(LETTERS_AND_DIGITS, 36)),
    ("github-token", "github" + "_pat_" + made(LETTERS_AND_DIGITS + "_", 82)),
    ("gitlab-token", "gl" + "pat-" + made(URL_SAFE, 20)),
    ("slack-token", "xo" + "xb-" + "123456789012-123456789012-" + made(LETTERS_AND_DIGITS, 24)),
    (
        "slack-webhook",
        "hooks.sl" + "ack.com/services/T0AB12CD3/B0AB12CD3/" + made(LETTERS_AND_DIGITS, 24),
    ),
    ("openai-key", "sk" + "-" + made(LETTERS_AND_DIGITS, 48)),
    ("openai-key", "sk" + "-proj-" + made(URL_SAFE, 120)),
    ("anthropic-key", "sk" + "-ant-api03-" + made(URL_SAFE, 95)),
    ("openrouter-key", "sk" + "-or-v1-" + made("0123456789abcdef", 64)),
    ("google-key", "AI" + "za" + made(URL_SAFE, 35)),
    ("google-token", "GOC" + "SPX-" + made(URL_SAFE, 28)),
    ("google-token", "ya" + "29." + made(URL_SAFE, 120)),
    ("huggingface-token", "h" + "f_" + made(LETTERS_AND_DIGITS, 34)),
    ("npm-token", "np" + "m_" + made(LETTERS_AND_DIGITS, 36)),
    ("pypi-token", "py" + "pi-AgEIcHlwaS5vcmc" + made(URL_SAFE, 120)),
    ("stripe-key", "sk" + "_live_" + made(LETTERS_AND_DIGITS, 24)),
    ("stripe-key", "wh" + "sec_" + made(LETTERS_AND_DIGITS, 32)),
    ("sendgrid-key", "S" + "G." + made(URL_SAFE, 22) + "." + made(URL_SAFE, 43)),
    ("twilio-key", "S" + "K" + made("0123456789abcdef", 32)),
    ("square-token", "sq0" + "csp-" + made(URL_SAFE, 43)),
    ("vault-token", "hv" + "s." + made(URL_SAFE, 90)),
    ("provider-key", "gs" + "k_" + made(LETTERS_AND_DIGITS, 52)),
    ("provider-key", "xa" + "i-" + made(LETTERS_AND_DIGITS, 80)),
    ("provider-key", "nv" + "api-" + made(URL_SAFE, 64)),
    ("provider-key", "r" + "8_" + made(LETTERS_AND_DIGITS, 37)),
    ("service-token", "dckr" + "_pat_" + made(URL_SAFE, 27)),
    ("service-token", "nt" + "n_" + made(LETTERS_AND_DIGITS, 46)),
    ("jwt", JWT),
]
SETTINGS = [
    "{}",
    "see {} there",
    "a\n{}\nb",
    '"{}"',
    "({})",
    "export X={}",
    "https://h/?n={}&x",
    "\t{}",
]
ASSIGNED = [
    ("key", "OPENAI_API_KEY={}"),
    ("key", "export MY_SERVICE_KEY='{}'\n"),
    ("key", 'const apiKey = "{}";'),
    ("key", "apiKey: '{}',"),
    ("key", '{{"apiKey": "{}"}}'),
    ("key", "x-api-key: {}\n"),
    ("key", 'os.environ["SOME_API_KEY"] = "{}"'),
    ("key", 'os.getenv("SOME_API_KEY", "{}")'),
    ("key", 'API_KEY: str = "{}"'),
    ("key", "curl 'https://h/x?api_key={}&n=1'"),
    ("key", "tool --api-key {} run"),
    ("secret", "aws_secret_access_key = {}\n"),
    ("key", "API_KEY_PROD={}"),
    ("token", "SLACK_TOKEN={}"),
    ("token", '"access_token":"{}"'),
    ("token", "if token == '{}':"),
    ("token", "//registry.npmjs.org/:_authToken={}\n"),
    ("secret", "clientSecret := `{}`"),
    ("secret", "'client_secret' => '{}',"),
    ("password", "password: {}\n"),
    ("password", "DB_PASS={}\n"),
    ("password", "tool --password={}"),
    ("password", "<password>{}</password>"),
    ("authorization", "Authorization: Bearer {}"),
    ("authorization", '-H "Authorization: Bearer {}" https://h'),
    ("authorization", '{{"Authorization": "Bearer {}"}}'),
    ("authorization", "proxy-authorization: token {}\n"),
    ("authorization", "the header Bearer {} was sent"),
    ("authorization", "Authorization: OAuth {}"),
    ("authorization", "Authorization: GenieKey {}"),
    ("authorization", "Authorization: DPoP {}"),
    ("key", 'echo -e "API_KEY={}\\n"'),
    ("key", 'API_KEY="{}\\n"'),
    ("key", 'API_KEY="{}'),
    ("secret", 'SECRET_KEY = " {}"'.replace("SECRET_KEY", "CLIENT_SECRET")),
    ("secret", 'client_secret = """{}"""'),
    ("key", 'api_key = f"{}"'),
    ("key", 'API_KEYS=["{}"]'),
    ("password", '"password": ["{}"]'),
    ("key", '{{"name":"API_KEY","value":"{}"}}'),
    ("key", "- name: API_KEY\n  value: {}"),
    ("password", "password: |\n  {}"),
    ("key", "set -x API_KEY {}"),
    ("token", "ENV API_TOKEN {}"),
    ("password", "pass: {}"),
    ("key", 'process.env.API_KEY ?? "{}"'),
    ("key", "**API Key:** {}"),
    ("key", "OPENAIKEY={}"),
    ("key", "stripeKey = '{}'"),
    ("token", "REQUEST_TOKEN={}"),
    ("token", "SYNC_TOKEN={}"),
    ("key", "HASH_KEY={}"),
]
DOTTED = [  # values that look like an expression, but begin with no word
    "DISCORD_TOKEN={}",
    'api_key = "{}"',
    "token: {}",
]
HARMLESS = [
    "const apiKey = await getApiKeyForModel(nextModel);",
    "apiKey: string; token?: string | undefined; password: str = None",
    "function login(password: string, token: AccessToken2Type) {}",
    "OPENAI_API_KEY=your-key-here",
    "API_KEY=YOUR_API_KEY_GOES_HERE_12345",
    "ANTHROPIC_API_KEY=sk-" + "ant-...",
    "OPENAI_API_KEY=sk-" + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "OPENAI_API_KEY=sk-" + "your-openai-api-key-goes-here",
    'api_key = "xxxxxxxxxxxxxxxxxxxx"',
    "token: <your-access-token-1234>",
    "API_KEY=${OPENAI_API_KEY_V2}",
    "API_KEY=$OPENAI_API_KEY_V2",
    'password = "{{ vault.db2_password_prod1 }}"',
    "apiKey: process.env.OPENAI_API_KEY_2x4y6z8a,",
    'token = os.environ["A1B2C3_TOKEN_X9Y8Z7"]',
    'token = os.environ.get("GITHUB_TOKEN")',
    "api_key=settings.services.k8s.api2Key3Name4",
    "secret = derive_key32(password, salt16bytes)",
    "API_KEY=$(cat ~/.config/key1a2b3c4d5e6f)",
    "password: passwordInputField1",
    'token: "claude-sonnet-4-20250514"',
    'SECRET_NAME = "prod-a1b2c3d4e5f6g7h8"',
    'key_path = "/home/me/.ssh/id_ed25519_a1b2c3d4"',
    'token_file: "/var/run/secrets/a1b2c3d4e5f6/token"',
    'secret: "https://vault.example.com/v1/a1b2c3d4e5f6g7h8"',
    'cache_key = "a1b2c3d4e5f6a7b8c9d0"',
    'publicKey: "a1b2c3d4e5f6a7b8c9d0"',
    '"nextPageToken": "CAUQAAa1b2c3d4e5f6"',
    '"totalTokens":100206,"maxToken":128000000000000',
    'key: "a1b2c3d4e5f6a7b8c9d0"',
    "keyboard=a1b2c3d4e5f6a7b8 tokenizer=a1b2c3d4e5f6a7b8",
    "commit 3f786850e387550fdab836ed7e6dc881de23001b",
    "sha512-" + made(BASE64, 86) + "==",
    "toolu_01" + made(LETTERS_AND_DIGITS, 22),
    "550e8400-e29b-41d4-a716-446655440000",
    "Authorization: Bearer ${token}",
    "Authorization: Bearer YOUR_ACCESS_TOKEN",
    "headers.Authorization = `Bearer ${apiKey}`",
    "Authorization: Basic credentials",
    "postgres://user:password@localhost:5432/db",
    "postgres://${USER}:${PASS}@localhost/db",
    "postgres://postgres:postgres@localhost/db",
    "http://localhost:5173/@vite/client",
    "https://github.com/owner/repo@v1.2.3",
    "git@github.com:owner/repo.git",
    "-----BEGIN PRIVATE " + "KEY-----",
    "-----BEGIN PRIVATE " + "KEY-----\n...\n-----END PRIVATE KEY-----",
    "-----BEGIN PUBLIC KEY-----\n" + "\n".join(PEM_LINES) + "\n-----END PUBLIC KEY-----",
    "risk-management-and-disk-encryption-for-task-force-members",
    "the password is the name of the dog",
    "gpg --recv-key 0x9B5C1A2D3E4F5061",
    's3_key = "uploads/2024/01/15/4f9a2c7be81d.png"',
    'token: "0xdAC17F958D2ee523a2206206994597C13D831ec7"',
    'TOKEN_CHARS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"',
    'content_key = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="',
    'git_token_sha = "4f9a2c7be81d4f9a2c7be81d4f9a2c7be81d0a1b"',
    "commit_key: 4f9a2c7be81d4f9a2c7be81d4f9a2c7be81d0a1b",
    'build_key="linux-x64-node20-a1b2c3d4"',
    "imagePullSecret: regcred-7d9f8b6c5d",
    "ASIAPACIFICREGION123",
    "interface Props { token: string; apiKey?: string }",
    "<li key={`row-${index}`}>",
    't("settings.password.placeholder")',
    'password = getpass.getpass("Password: ")',
    "secretKeyRef: {name: db, key: password}",
    "DB_PASSWORD=${DB_PASSWORD:-postgres}",
    'if (!process.env.API_KEY) throw new Error("API_KEY is missing")',
    'api_key=os.getenv("OPENAI_API_KEY")',
    'assert token == "test-token"',
    'cacheKey: "user-profile-settings-v2"',
    "ENV NODE_ENV production",
    "set -x PATH $HOME/bin",
    "password_hash = bcrypt.hashpw(password, bcrypt.gensalt())",
    "Authorization: `Bearer ${await this.getAccessToken()}`",
    'keys: ["ArrowUp", "ArrowDown", "Enter"]',
    'token: "keyword.control.typescript"',
    'password: "correct horse"',
    "--api-key <key>",
    "GITHUB_TOKEN: ${{ secrets.GITHUB_TOKEN }}",
    '"key": "value", "value": "something-else-1234"',
    "session_key = generate_session_key(user_id=42)",
    "postgres://me:$PASSWORD@db/x",
]


def as_line(text: str, depth: int = 1) -> bytes:
    """A JSONL line with `text` in a string, JSON being put into JSON `depth` times."""
    for _ in range(depth):
        text = json.dumps({"role": "user", "text": text})
    return text.encode() + b"\n"


def text_of(line: bytes, depth: int = 1) -> str:
    value = line.decode()
    for _ in range(depth):
        value = json.loads(value)["text"]
    return value


def assert_gone(secret: str, data: bytes) -> None:
    for at in range(len(secret) - 7):
        assert secret[at : at + 8].encode() not in data


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("kind", "token"), TOKENS)
def test_keys_are_replaced_wherever_they_stand(kind, token, depth):
    for around in SETTINGS:
        replaced, counts = redact(as_line(around.format(token), depth))
        assert text_of(replaced, depth) == around.format(f"[REDACTED:{kind}]")
        assert counts == {kind: 1}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("kind", "around"), ASSIGNED)
def test_values_are_replaced_by_their_name(kind, around, depth):
    value = PASSWORD if kind == "password" else KEY
    replaced, counts = redact(as_line(around.format(value), depth))
    assert text_of(replaced, depth) == around.format(f"[REDACTED:{kind}]")
    assert counts == {kind: 1}


def test_a_password_may_hold_other_quotes():
    text = "password = \"{}\"; password: '{}'"
    replaced, counts = redact(as_line(text.format(PASSWORD + "'x`y", PASSWORD + "`z")))
    assert text_of(replaced) == text.format("[REDACTED:password]", "[REDACTED:password]")
    assert counts == {"password": 2}


def test_values_are_replaced_in_the_entrys_own_json():
    line = json.dumps({"type": "custom", "data": {"apiKey": KEY, "n": [1, {"password": PASSWORD}]}})
    replaced, counts = redact(line.encode())
    assert json.loads(replaced)["data"] == {
        "apiKey": "[REDACTED:key]",
        "n": [1, {"password": "[REDACTED:password]"}],
    }
    assert counts == {"key": 1, "password": 1}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", ["RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", ""])
def test_private_keys_are_replaced_whole(kind, depth):
    replaced, counts = redact(as_line(f"key:\n{pem(kind)}\nend", depth))
    assert text_of(replaced, depth) == "key:\n[REDACTED:private-key]\nend"
    assert counts == {"private-key": 1}


def test_private_keys_that_are_cut_off_or_put_together_are_replaced():
    torn = as_line("\n".join(pem().splitlines()[:6]) + "\n[200 more lines]")
    joined = as_line('k = "' + '\\n" +\n  "'.join(pem().splitlines()) + '";')
    for line in (torn, joined):
        replaced, counts = redact(line)
        assert counts == {"private-key": 1}
        assert json.loads(replaced)
        for part in PEM_LINES:
            assert_gone(part, replaced)


def test_a_private_key_over_several_lines_keeps_their_number():
    data = b"a\n" + pem().encode() + b"\nb\n"
    replaced, counts = redact(data)
    assert counts == {"private-key": 1}
    assert replaced.count(b"\n") == data.count(b"\n")
    assert replaced.startswith(b"a\n[REDACTED:private-key]")


@pytest.mark.parametrize(
    "decorated",
    [
        "-{}",
        "+{}",
        "3f786850e (Some One 2024-01-01 10:00:00 +0000 12) {}",
        "folder/key.pem:12:{}",
        " 12 | {}",
        "    12\u2192{}",
        "> {}",
        "# {}",
        " * {}",
    ],
)
@pytest.mark.parametrize("lines", [None, 6])
def test_private_keys_are_found_behind_what_tools_put_before_each_line(decorated, lines):
    text = "\n".join(decorated.format(line) for line in pem().splitlines()[:lines])
    replaced, counts = redact(as_line(text))
    assert counts == {"private-key": 1}
    for part in PEM_LINES[:4]:
        assert_gone(part, replaced)


@pytest.mark.parametrize("around", DOTTED)
def test_a_value_with_dots_is_no_expression(around):
    value = "MTA5OTk5OTk5OTk5OTk5OTk5.GaBcDe.p7CgQ0PBzKx81mQ2"
    replaced, counts = redact(as_line(around.format(value)))
    assert counts.total() == 1
    assert_gone(value, replaced)


def test_names_of_files_and_messages_lose_their_secrets():
    token = next(token for kind, token in TOKENS if kind == "github-token")
    assert redact_text(f"{token}.jsonl") == "[REDACTED:github-token].jsonl"
    assert redact_text(f"http://me:{PASSWORD}@127.0.0.1:1 refused").startswith(
        "http://me:[REDACTED:url-password]@"
    )
    assert redact_text("b\udcff.jsonl") == "b\udcff.jsonl"


@pytest.mark.parametrize("depth", [1, 2])
def test_passwords_in_addresses_are_replaced(depth):
    for password in (PASSWORD, "hunter2", "p$a4vUCsMehGAkW"):
        text = "psql postgres://admin:{}@db.example.com:5432/app?x=1"
        replaced, counts = redact(as_line(text.format(password), depth))
        assert text_of(replaced, depth) == text.format("[REDACTED:url-password]")
        assert counts == {"url-password": 1}


def test_basic_authorization_is_known_by_what_it_holds():
    import base64

    value = base64.b64encode(b"someone:open sesame").decode()
    replaced, counts = redact(as_line(f"Authorization: Basic {value}"))
    assert text_of(replaced) == "Authorization: Basic [REDACTED:authorization]"
    assert counts == {"authorization": 1}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text, depth):
    line = as_line(text, depth)
    assert redact(line) == (line, {})


def test_opaque_values_and_images_stay():
    noise = random.Random(7)
    for name in ("thinkingSignature", "textSignature", "encrypted_content", "data"):
        blob = "".join(noise.choices(BASE64, k=200_000)) + "=="
        line = json.dumps({"type": "thinking", name: blob, "mimeType": "image/png"}).encode()
        assert redact(line) == (line, {})
        escaped = as_line(line.decode())
        assert redact(escaped) == (escaped, {})


def test_no_trace_of_the_value_is_left():
    lines = [as_line(f"x {token} y", depth) for _, token in TOKENS for depth in (1, 2)]
    lines += [as_line(around.format(KEY)) for kind, around in ASSIGNED if kind != "password"]
    replaced, counts = redact(b"".join(lines))
    assert sum(counts.values()) == len(lines)
    for _, token in TOKENS:
        assert_gone(token[-16:], replaced)
    assert_gone(KEY, replaced)
    shorter, _ = redact(as_line(f"API_KEY={KEY[:20]}1a"))
    longer, _ = redact(as_line(f"API_KEY={KEY}{KEY[::-1]}"))
    assert shorter == longer


def test_a_second_pass_finds_nothing_and_blocks_are_as_good_as_lines():
    lines = [as_line(around.format(KEY)) for _, around in ASSIGNED]
    lines += [as_line(token) for _, token in TOKENS] + [as_line(pem())]
    replaced, counts = redact(b"".join(lines))
    assert redact(replaced) == (replaced, {})
    one_by_one = [redact(line) for line in lines]
    assert b"".join(line for line, _ in one_by_one) == replaced
    assert sum((count for _, count in one_by_one), start=type(counts)()) == counts


def test_finds_lie_apart_and_in_order():
    text = " ".join(f'token="{token}" https://u:{token}@h/' for _, token in TOKENS)
    found = find(as_line(text))
    assert [start for start, _, _ in found] == sorted(start for start, _, _ in found)
    assert all(end <= later for (_, end, _), (later, _, _) in itertools.pairwise(found))


PIECES = [
    *(token for _, token in TOKENS),
    *(around.format(KEY) for _, around in ASSIGNED),
    *HARMLESS,
    pem(),
    pem()[:200],
    "\\",
    '"',
    "'",
    "\n",
    "\t",
    "\\n",
    "é\u2028\U0001f511",
    "password=",
    "token: ",
    "-----BEGIN PRIVATE " + "KEY-----",
    "://a:",
    "@",
    "\x1b[0m",
]


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=12),
    depth=st.integers(1, 4),
    ascii_only=st.booleans(),
)
def test_json_stays_valid(pieces, depth, ascii_only):
    value = "".join(pieces)
    for _ in range(depth):
        value = json.dumps({"text": value, "n": [1, 2]}, ensure_ascii=ascii_only)
    line = value.encode()
    replaced, counts = redact(line)
    assert replaced.count(b"\n") == 0
    text = replaced.decode()
    assert text.count("[REDACTED:") == sum(counts.values())
    parsed = json.loads(text)
    assert list(parsed) == ["text", "n"]
    assert parsed["n"] == [1, 2]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400), pieces=st.lists(st.sampled_from(PIECES), max_size=4))
def test_any_bytes_are_taken(data, pieces):
    data = data.join(piece.encode() for piece in pieces) if len(pieces) > 1 else data
    replaced, counts = redact(data)
    assert replaced.count(b"\n") == data.count(b"\n")
    if not counts:
        assert replaced is data


PREFIXES = [rule.literal for search in load().tokens for rule in search.rules]
BEGIN = b"-----BEGIN PRIVATE " + b"KEY-----"
ADVERSARIES = [
    *PREFIXES,
    *(b" " + prefix for prefix in PREFIXES),
    *(b"00m" + prefix for prefix in PREFIXES),
    *(b"key=", b'key="', b"token:", b"_key=key-", b"password='a1!", b"key=" + b"aB3" * 1300 + b" "),
    *(b"a.b.", b"/a/", b"://key=", b"://a:b", b"://", b"@", b"=", b"A", b"A1", b"Bearer "),
    *(b"Authorization: ", b"\\", b'\\"', b"\\\\t", b"key \\t", b"key\\\\\\\\"),
    *(b"-----BEGIN ", b"-----BEGIN A ", BEGIN, BEGIN + b"A", BEGIN + b"A" * 40),
]


def seconds_of(data: bytes) -> float:
    started = time.monotonic()
    redact(data)
    return time.monotonic() - started


@pytest.mark.parametrize("head", [b"", b"API_KEY=", b'"token":"'])
def test_no_repeated_piece_costs_more_than_linear_time(head):
    for unit in ADVERSARIES:  # quadratic time would be ten times the bound and more
        took = seconds_of(head + unit * (100_000 // len(unit)))
        assert took < 4, f"{head + unit[:40]!r} repeated took {took:.1f} s"


@pytest.mark.parametrize(
    "unit",
    [b"ey" + b"J", b"00mey" + b"J", b"A", b"=", BEGIN + b"A", b"://a:b", b"aB3/" * 300 + b"+"],
)
def test_a_line_of_five_megabytes_takes_seconds_at_most(unit):
    took = seconds_of(b'{"token":"' + unit * (5_000_000 // len(unit)) + b'"}')
    assert took < 30, f"{unit[:40]!r} repeated took {took:.1f} s"


def test_what_looks_random():
    words = [
        "getApiKeyForModel",
        "claude-sonnet-4-20250514",
        "base64url-oauth2Token",
        "my-test-1234567890",
    ]
    assert not any(is_secret_value(word.encode(), "key") for word in words)
    found = sum(is_secret_value(made(URL_SAFE, 20, seed).encode(), "key") for seed in range(500))
    assert found >= 480
