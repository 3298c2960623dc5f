"""Read and write the files of other programs: model folders of transformers, and adapters of
peft."""
