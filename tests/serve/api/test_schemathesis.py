"""schemathesis (https://schemathesis.readthedocs.io) against the served OpenAPI: whatever it makes up, of the right
form or of a wrong one, the answer has a documented status and an error is in OpenAI's shape, or of Anthropic's and
Ollama's paths in theirs."""

import json
import tempfile

import pytest
from client import Client
from fake_llm import FakeLLM
from hypothesis import HealthCheck, Phase, given, seed, settings

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, of the extra test")
checks = pytest.importorskip("schemathesis.checks").CHECKS

KEY = {"authorization": "Bearer admin"}
EXAMPLES = 12  # of each operation, right and wrong; 300 of each found nothing more
REPEATABLE = {
    "database": None,
    "deadline": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}
# Whether values of the right types are in their ranges depends on the model, and is not in the document.
CHECKED = [checks.get_one(name) for name in checks.get_all_names() if name != "positive_data_acceptance"]
FOLDER = tempfile.TemporaryDirectory()  # of files and batches; operations are known when tests are collected
CLIENT = Client(FakeLLM(reply="the quick"), admin_keys=("admin",), batch_dir=FOLDER.name)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", CLIENT.app)
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
WITH_INPUT = [label for label in OPERATIONS if (label.startswith("POST") or "{" in label) and label != "POST /ping"]


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_documented(label):
    operation, statuses = OPERATIONS[label], set()
    modes = [schemathesis.GenerationMode.POSITIVE]
    modes += [schemathesis.GenerationMode.NEGATIVE] * (label in WITH_INPUT and "{" not in label)

    def check(case):
        response = case.call(headers=KEY)
        case.validate_response(response, checks=CHECKED)
        statuses.add(response.status_code)
        if response.status_code != 200:
            told = json.loads(response.text)["error"]
            if " /api/" in label:
                assert told and isinstance(told, str)
                return
            anthropics = "/v1/messages" in label
            assert told.keys() == ({"message", "type"} if anthropics else {"message", "type", "param", "code"})
            assert told["message"]

    for mode in modes:
        whole = settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seed(0)(whole(given(case=operation.as_strategy(generation_mode=mode))(check)))()
    assert statuses <= {200, 400, 404} and (label not in WITH_INPUT or statuses & {400, 404})
