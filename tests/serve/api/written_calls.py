"""Replies with calls as models write them, by style: {text: (contents joined, [(name, arguments)])}, of functions with
the schemas of test_tool_parsers.py."""

import json


def qwen(name, **given):
    """As its template writes a call."""
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


HTML = "a\n<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter> and </function> </parameter>, b\n"
QWEN = {
    "plain <tool": ("plain <tool", []),
    qwen("f", n=3, x="None", o="{'a': [1]}"): ("", [("f", '{"n": 3, "x": null, "o": {"a": [1]}}')]),
    "I look.\n" + qwen("get_weather", city="12\n\n </tool_call> é", ok="True") + "\n" + qwen("f") + " so": (
        "I look.\n so",
        [("get_weather", '{"city": "12\\n\\n </tool_call> é", "ok": true}'), ("f", "{}")],
    ),
    qwen("get_weather", city='\n  "x"\t', ok=" false"): (
        "",
        [("get_weather", '{"city": "\\n  \\"x\\"\\t", "ok": false}')],
    ),
    qwen("get_weather", city=HTML): ("", [("get_weather", json.dumps({"city": HTML}))]),
    qwen("unknown", a="1").replace("\n", ""): ("", [("unknown", '{"a": "1"}')]),
    # What is around calls left out, as models do; marks of the last value and of the call too.
    "So: " + qwen("f", n=1)[12:]: ("So: ", [("f", '{"n": 1}')]),
    qwen("f")[:-13] + "\n" + qwen("f", n=2)[12:]: ("", [("f", "{}"), ("f", '{"n": 2}')]),
    "<tool_call><function=get_weather><parameter=city>A\n</function>\n</tool_call> é": (
        " é",
        [("get_weather", '{"city": "A\\n"}')],
    ),
    "<tool_call><function=f><parameter=n>1</parameter></tool_call>": ("", [("f", '{"n": 1}')]),
    "<tool_call><function=get_weather><parameter=city>\nA\n</function>": ("", [("get_weather", '{"city": "A"}')]),
    # Cut off.
    qwen("get_weather", city="Paris", ok="true")[:56]: ("", [("get_weather", '{"city": "Pari')]),
    qwen("f", n="three", y=1, x=0)[:-38]: ("", [("f", '{"n": "three", "y": "1", "x": 0')]),
    "<tool_call><function=f><parameter=n>1</para": ("", [("f", '{"n": 1</para')]),
    "<tool_call><function=f><parameter=n": ("", [("f", "")]),
    # No calls.
    "<tool_call>\nno function": ("<tool_call>\nno function", []),
    "<tool_call>\n<function=a b>\n</tool_call>.": ("<tool_call>\n<function=a b>\n</tool_call>.", []),
    "<function=g> is a tag, <function=f": ("<function=g> is a tag, <function=f", []),
}
GLM = {
    "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>x</arg_key>\n<arg_value>0.5</arg_value>\n"
    "</tool_call>\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>a </tool_call> b\n</arg_value>"
    "</tool_call>": ("", [("f", '{"n": 3, "x": 0.5}'), ("get_weather", '{"city": "a </tool_call> b\\n"}')]),
    "<tool_call>f\n</tool_call>.": (".", [("f", "{}")]),
    "<tool_call>f<arg_key>n</arg_key></tool_call>.": (".", [("f", "{}")]),
    "<tool_call>word</tool_call>": ("<tool_call>word</tool_call>", []),
    "<tool_call>f": ("<tool_call>f", []),
    "a <tool_call>get_weather<arg_key>city</arg_key><arg_value>B": ("a ", [("get_weather", '{"city": "B')]),
}
MINIMAX = {
    'a<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n'
    '<invoke name="get_weather">\n<parameter name="city">\nB\n</parameter>\n</invoke>\n</minimax:tool_call>': (
        "a",
        [("f", '{"n": 1}'), ("get_weather", '{"city": "B"}')],
    ),
    '<minimax:tool_call><invoke name="g"></invoke><invoke name="get_weather"><parameter name="city">  B\n</parameter>'
    "</invoke></minimax:tool_call>\nb": ("b", [("g", "{}"), ("get_weather", '{"city": "  B\\n"}')]),
}
TOOLS, ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
TWO = [("f", '{"a": {"b": "}"}}'), ("get_weather", "{}")]


def v3(name, arguments):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


DEEPSEEK_CALLS = {
    f"I look.{TOOLS}{v31(*TWO[0])}{v31(*TWO[1])}{ENDS}": ("I look.", TWO),
    f"{TOOLS}{v3(*TWO[0])}\n{v3(*TWO[1])}{ENDS} so": (" so", TWO),
    f"{TOOLS}{v31('f', '')}{ENDS}\nb": ("b", [("f", "{}")]),
    TOOLS + v31("f", "\n```json{}```") + ENDS: ("", [("f", "{}")]),
    TOOLS + v31("f", f'{{"a": "{ENDS}"}}'): ("", [("f", f'{{"a": "{ENDS}"}}')]),
    TOOLS + v31("f", '{"a": 1') + f"{ENDS}.": (".", [("f", '{"a": 1')]),
    v31("f", '{"a": "lo').removesuffix("<｜tool▁call▁end｜>"): ("", [("f", '{"a": "lo')]),
    v3("f", "{")[:40]: (v3("f", "{")[:40], []),
    TOOLS + v31("", "{}"): (v31("", "{}"), []),
    "a <｜tool": ("a <｜tool", []),
}


def kimi(*calls):
    each = [f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{text}<|tool_call_end|>" for id, text in calls]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


KIMI_CALLS = {
    "I look." + kimi(("functions.f:0", TWO[0][1]), ("functions.get_weather:1", " {}")): ("I look.", TWO),
    kimi(("a.b:3", "{}"), ("f", "{}")).replace("end|><|tool_call_b", "end|> no <|tool_call_b"): (
        "no ",
        [("a.b", "{}"), ("f", "{}")],
    ),
    kimi(("functions.f:12", '{"a": "<|tool_call_end|>"}'))[28:]: ("", [("f", '{"a": "<|tool_call_end|>"}')]),
}
LISTED = [{"name": name, "arguments": json.loads(arguments), "id": "a" * 9} for name, arguments in TWO]
MISTRAL = {
    f"I look.[TOOL_CALLS] {json.dumps(LISTED)}": ("I look.", TWO),
    f"[TOOL_CALLS]{json.dumps(LISTED[0])}\nso": ("so", TWO[:1]),
    "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in TWO): ("", TWO),
    f"a[TOOL_CALLS] f{TWO[0][1]}[TOOL_CALLS]get_weather[CALL_ID]{'a' * 9}[ARGS] {{}} b": ("a b", TWO),
    '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]': ("", [("f", '{"a": "[TOOL_CALLS]')]),
    "[TOOL_CALLS]f[ARGS]": ("[TOOL_CALLS]f[ARGS]", []),
    "[TOOL_CALLS][ARGS]{}": ("[TOOL_CALLS][ARGS]{}", []),
    '[TOOL_CALLS] [{"a": 1}]': ('[TOOL_CALLS] [{"a": 1}]', []),
    '[TOOL_CALLS][{"a"': ('[TOOL_CALLS][{"a"', []),
    "[TOOL_CALLS][1]": ("[TOOL_CALLS][1]", []),
    "[TOOL_CALLS][]": ("[TOOL_CALLS][]", []),
    "[TOOL_CALLS] so[TOOL_CALLS]f{}": ("[TOOL_CALLS] so", [("f", "{}")]),
    "a [TOOL": ("a [TOOL", []),
}
LFM2 = {
    "a<|tool_call_start|>[get_weather(city='Pa\\'ris', ok=True), functions.f-g(n=-3, o={'a': [null, (1, 2)]})]"
    "<|tool_call_end|>\nb": (
        "ab",
        [
            ("get_weather", '{"city": "Pa\'ris", "ok": true}'),
            ("functions.f-g", '{"n": -3, "o": {"a": [null, [1, 2]]}}'),
        ],
    ),
    "<|tool_call_start|>f()\nf(2, x=0.5)<|tool_call_end|>": ("", [("f", "{}"), ("f", '{"n": 2, "x": 0.5}')]),
    '<|tool_call_start|>[get_weather(city="a\n)] <|tool_call_end|> (\'")]<|tool_call_end|>': (
        "",
        [("get_weather", '{"city": "a\\n)] <|tool_call_end|> (\'"}')],
    ),
    '<|tool_call_start|>[{"name": "f", "arguments": {"n": 1}}, {"name": "g"}]<|tool_call_end|>': (
        "",
        [("f", '{"n": 1}'), ("g", "{}")],
    ),
    # The mark behind them left out, and cut off.
    "<|tool_call_start|>[f(n=1)]": ("", [("f", '{"n": 1}')]),
    "<|tool_call_start|>[f(n=": ("<|tool_call_start|>[f(n=", []),
    "so <|tool_call_st": ("so <|tool_call_st", []),
    # No calls.
    "<|tool_call_start|>[f(n=open(1))]<|tool_call_end|> so": (
        "<|tool_call_start|>[f(n=open(1))]<|tool_call_end|> so",
        [],
    ),
    "<|tool_call_start|>f(1, 2, 3, 4)<|tool_call_end|>": ("<|tool_call_start|>f(1, 2, 3, 4)<|tool_call_end|>", []),
    "<|tool_call_start|>it's<|tool_call_end|>.": ("<|tool_call_start|>it's<|tool_call_end|>.", []),
    "<|tool_call_start|>1<|tool_call_end|>.": ("<|tool_call_start|>1<|tool_call_end|>.", []),
    '<|tool_call_start|>{"a": 1}<|tool_call_end|>.': ('<|tool_call_start|>{"a": 1}<|tool_call_end|>.', []),
}
