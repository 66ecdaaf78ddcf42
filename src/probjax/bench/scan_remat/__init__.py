"""The suite `scan_remat`: train steps of deep models, layers unrolled or scanned, by what backward keeps."""
