"""Images in prompts: how a checkpoint's own encoder reads them, and where its vectors stand among a text's tokens."""
