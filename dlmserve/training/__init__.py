"""Training the step predictors of a model: prompts, recorded decodings, networks. Nothing here serves."""
