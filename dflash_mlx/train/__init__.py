"""Training drafters on the user's own machine: DFlash and D2SD's variable-prefix drafter."""
