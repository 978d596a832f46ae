"""Reading samples: annotations, video readers, transforms, the sampler, the loader, the skip ledger."""
