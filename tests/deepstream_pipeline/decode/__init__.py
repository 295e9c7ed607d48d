import pytest

pytest.register_assert_rewrite("tests.deepstream_pipeline.decode.decoder_contract")
