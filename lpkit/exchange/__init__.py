"""Models of other programs: folders of Hugging Face and adapters of peft, read and written."""
