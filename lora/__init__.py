if __name__ != "asyncengine.lora":
    raise ImportError("import asyncengine.lora, not lora")
