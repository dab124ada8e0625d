"""Which of the small checkpoints in hf/references are not served one by one: all that a server runs of them is in
others. serve/test_families_served.py has the rest, hf/test_families.py generates from these."""

# llama_dynamic's rotation changes with every token that transformers appends; hf/test_families.py has its logits.
ALIKE = "arcee dots1 ernie4_5 ernie4_5_moe exaone4 gemma glm4_moe granitemoe minimax_m2 olmo3 olmoe qwen2_moe seed_oss"
ALSO = "exaone_moe flex_olmo glm4_moe_lite hy_v3 nemotron solar_open starcoder2 youtu"
# And of these: norms, factors and activations apart, which are the same in scoring.
FURTHER = "afmoe apertus cohere2_moe glm granitemoe_swa granitemoeshared helium hunyuan_moe internlm3 nanochat olmo"
FURTHER += " galactica falcon_new falcon_rw mpt gpt_bigcode dbrx gptj minicpm3 persimmon stablelm"
FURTHER += " hyperclovax jais2 cwm iquestcoder ministral sarvam_mla sarvam_moe vaultgemma kolibri1"
LEFT_OUT = ("llama_dynamic", *ALIKE.split(), *ALSO.split(), *FURTHER.split())
