"""Files of llama.cpp and Ollama (GGUF), read as the folder of Hugging Face that they were made from."""
