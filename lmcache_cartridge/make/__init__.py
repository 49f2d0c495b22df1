"""What authors use: prefill, compaction, training, evaluation, foreign formats."""
