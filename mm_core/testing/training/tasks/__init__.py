"""The conformance kit of tasks (`mm_core.contracts.Task`): what the loop and an evaluation rely on."""
