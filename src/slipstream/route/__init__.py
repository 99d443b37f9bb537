"""The model router: each step of an agent goes to the (model, speed tier) pair that its policy chooses."""
