"""A trained model as files that other runtimes read: GGUF for llama.cpp.

Each is written under a temporary name, checked, and only then renamed.
"""
