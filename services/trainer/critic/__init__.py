"""The critic of PPO: a value model beside the policy, on the same device."""
