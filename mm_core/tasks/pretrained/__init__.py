"""The task `pretrained`: training any model of Transformers."""
