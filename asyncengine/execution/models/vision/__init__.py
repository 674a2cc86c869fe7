"""Models that read pictures: their towers, how a picture is processed for them, and what their prompts hold for it."""
