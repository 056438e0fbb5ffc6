"""What tests share: real servers, and stores that can be killed."""
