from trtllm_kvmap.cli import main

main()
