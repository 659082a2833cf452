"""An in-process torch engine that holds its weights in SGLang's fused tensor-parallel layout."""
