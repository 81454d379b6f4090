"""The pipeline's tasks: thin KFP components, one for each stage, and what their bodies call."""
