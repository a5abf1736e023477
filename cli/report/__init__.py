"""Pictures of answers: the demo's report, its page, and a prompt coloured in the terminal."""
