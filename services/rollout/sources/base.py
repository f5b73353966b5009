"""What a data source is made of. The definitions are the library's, which opens sources before anything starts."""

from paceline.prompts.records import RecordOptions, to_prompt
from paceline.prompts.source import Malformed, MalformedRecords, Prompt, Source

__all__ = ["Malformed", "MalformedRecords", "Prompt", "RecordOptions", "Source", "to_prompt"]
