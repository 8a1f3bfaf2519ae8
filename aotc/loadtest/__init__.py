"""Load on servers that speak OpenAI's API, and what they make of it: `aotc bench serve`."""
