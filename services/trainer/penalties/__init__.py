"""Terms of the objective beside the policy loss: KL to a reference, and a teacher."""
