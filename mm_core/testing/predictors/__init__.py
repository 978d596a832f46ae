"""The conformance kit of predictors (`mm_core.contracts.Predictor`), with small models on the CPU."""
